"""Training a backbone together with a prototype head; the only importer of Trainer."""
