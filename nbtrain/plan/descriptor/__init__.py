"""The run descriptor: its table of fields, how a document is read, its rules, and what it makes.

``table`` (of ``field`` and ``hyperparams``) says what there is; ``document`` and ``misnamed`` read
a text; ``references`` looks up what it names; ``draft`` fills in every field; ``rules``,
``machine``, ``parent``, ``terms`` and ``verl_settings`` refuse what is wrong; ``build`` makes the
resolved plan; ``resolve`` does all of it in order.
"""
