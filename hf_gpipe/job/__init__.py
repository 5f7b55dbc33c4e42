"""The processes of a job: how they start, meet, watch each other, tell each other values, and end."""
