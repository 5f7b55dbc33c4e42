"""Pairs of sentences from message catalogues (.mo), for scripts/message_catalogues.py."""
