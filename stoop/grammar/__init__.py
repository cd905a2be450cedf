"""Grammars that constrain answers: compiled by xgrammar, followed token by token on the host."""
