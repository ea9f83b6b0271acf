"""A folder of text or token arrays as batches of packed documents; each rank reads only its part."""
