"""Mistakes in the recipes that init writes for a folder of files."""

C, S = "cli/test_init_command.py", "init/test_survey.py"
MUTANTS = [
    ("init.write:write_new", "os.link(aside, path)", "os.replace(aside, path)", "A recipe that exists is not replaced.", f"{S} {C}"),
    ("init.write:write_new", "            os.unlink(aside)\n", "            pass\n", "Nothing is left beside the recipe.", S),
    ("init.write:scalar", "if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:", "if True:",
     "Any name of a file can be a path of the recipe.", C),
    ("init.write:one_line", "if char.isprintable() else", "if True else", "Names of files do not control the terminal.", C),
    ("init.survey:_sort", "entry.is_symlink() and lies_outside(path, root)", "False",
     "Links that lead out of the folder are not followed.", C),
    ("init.survey:_sort", "elif not entry.is_symlink():", "else:", "A link to a folder above does not go round in circles.", C),
    ("init.survey:_sort", "elif not entry.is_file():", "elif False:", "Pipes and sockets are no files.", C),
    ("init.survey:_look", "        split |= bool(special)\n", "", "No source reads the files of a model beside it.", C),
    ("init.survey:Files.add", "if len(self.sample) < SAMPLE:", "if True:", "Memory does not grow with the files.", S),
    ("init.meaning:_text_column", "if usual := next((name for name in _TEXT if name in texts), None):", "if usual := None:",
     "A usual name of the text column is found.", C),
    ("init.meaning:meaning", "(reward := _reward(prompt.row, row)) is not None", "(reward := None) is not None",
     "Prompts with right answers are rewarded.", C),
    ("init.meaning:meaning", "for labeled in (False, True):", "for labeled in (False,):", "Answers with labels are found.", C),
    ("init.write:_corpus", '        if one.about and one.about != "text":\n', "        if False:\n",
     "The recipe names the column of the text.", C),
    ("init.write:_dpo", '["  loss: kto  # answers with a label"]', "[]", "Labels have the loss that reads them.", C),
    ("init.propose:propose", "pretrains = bool(documents) and (not later or budgets.text_tokens >= least)", "pretrains = bool(documents)",
     "A page of text beside conversations trains no model from nothing.", C),
    ("init.propose:_choose_size", "if budgets.readings > (longest := Shards().max_epochs):", "if (longest := Shards().max_epochs) < 0:",
     "Too little text is refused.", C),
]  # fmt: skip
