# What only the repository and the teachers' copy can make; `Makefile` includes it.

.PHONY: student teacher

student: .venv/dev.stamp $(if $(SITE),.venv/docs.stamp) ## copy pipelab as students get it to build/student, with what is published; with its site: SITE=1
	@echo "pipelab: copying what students get to build/student"
	@$(BIN)/python teacher/distribute.py student build/student
ifdef SITE
	@echo "pipelab: building their site in build/student/site"
	@cd build/student && PYTHONPATH=. TUTORIALS=$(CURDIR)/build/tutorials NO_MKDOCS_2_WARNING=1 $(CURDIR)/$(BIN)/mkdocs build --strict
endif
	@echo "pipelab: building what is published in build/student/dist"
	@cd build/student && $(CURDIR)/$(BIN)/python -m build --no-isolation

teacher: .venv/dev.stamp $(if $(SITE),site) ## copy it with solutions and keys to build/teacher, with a wheel that must not be published; SITE=1
	@echo "pipelab: copying what teachers get to build/teacher"
	@$(BIN)/python teacher/distribute.py teacher build/teacher
	@$(if $(SITE),cp -r site build/teacher/)
	@echo "pipelab: building their wheel in build/teacher/dist"
	@cd build/teacher && $(CURDIR)/$(BIN)/python -m build --no-isolation --wheel
