"""The test files that take longest, with the seconds that they took on an idle machine."""

LONGEST_FILES = {
    "server/test_soak.py": 72,
}
