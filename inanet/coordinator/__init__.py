"""The coordinator: peers, admission, jobs and their rounds."""
