"""Searching a recipe's hyper-parameters: runs of many recipes, chosen by Optuna."""
