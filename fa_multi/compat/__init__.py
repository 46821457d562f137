"""The names that other libraries' users already type, with those libraries' meanings."""
