# What only the repository and the teachers' copy can make; `Makefile` includes it.

.PHONY: student teacher

student: .venv/docs.stamp .venv/dev.stamp ## copy pipelab as students get it to build/student, with its site and what is published
	@$(BIN)/python teacher/distribute.py student build/student
	@cd build/student && export NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(CURDIR)/build/student && \
		$(CURDIR)/$(BIN)/python -m mkdocs build --strict && $(CURDIR)/$(BIN)/python -m build

teacher: site .venv/dev.stamp ## copy it with solutions and keys to build/teacher, with a wheel that must not be published
	@$(BIN)/python teacher/distribute.py teacher build/teacher
	@cp -r site build/teacher/ && cd build/teacher && $(CURDIR)/$(BIN)/python -m build --wheel
