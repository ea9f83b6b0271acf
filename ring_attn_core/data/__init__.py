"""Batches of packed documents from a folder of text or token arrays; each rank reads only its part."""
