"""Batches of packed documents from a folder of texts, rows or token arrays; also prefix trees, rollouts and dense masks."""
