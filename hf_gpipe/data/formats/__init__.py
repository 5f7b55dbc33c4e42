"""The formats of local corpora, one file each: rows of a file, from any row on.

A format is a function `read(path, start)`: an iterator of (where, row), where "pairs.jsonl, line 7" is what messages
call a row, and a row maps names to values. `start` rows are passed over, as cheaply as the format allows. Readers raise
DataError for a file that is missing, unreadable or malformed; the message names the file and the line.
"""
