"""A folder of text or token arrays as batches of packed documents, of which every rank reads its part."""
