"""Which of several models continues a text best: a judge that is judged first, Elo, and BLEU."""
