"""Figures and tables of the papers: what each is run with here, and which of its claims hold.

:mod:`.registry` lists the entries; each is a module with one function that runs it. A claim that does not hold is a
result like any other and is reported with its reason.
"""
