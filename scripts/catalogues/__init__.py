"""Pairs of sentences from message catalogues (.mo and .po), for scripts/message_catalogues.py."""
