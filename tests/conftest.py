"""Settings of every test."""

from hypothesis import settings

settings.register_profile("asyncrl", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("asyncrl")
