// The editor of code: CodeMirror in place of a textarea. esbuild makes one file of it and of what it imports, where npm
// is; without it, pages keep the textarea. `pipelabEditor(area, changed)` returns { value, mark(line), focus() }.
import { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
import { python } from "@codemirror/lang-python";
import { bracketMatching, indentOnInput, indentUnit, syntaxHighlighting } from "@codemirror/language";
import { EditorState, StateEffect, StateField, Transaction } from "@codemirror/state";
import { Decoration, drawSelection, EditorView, keymap, lineNumbers } from "@codemirror/view";
import { classHighlighter } from "@lezer/highlight";

const setWrong = StateEffect.define();
const wrong = StateField.define({
  create: () => Decoration.none,
  update(set, { docChanged, effects, newDoc }) {
    const line = effects.find((each) => each.is(setWrong))?.value;
    if (line && line <= newDoc.lines)
      return Decoration.set(Decoration.line({ class: "pg-wrong" }).range(newDoc.line(line).from));
    return docChanged || line === null ? Decoration.none : set;
  },
  provide: (field) => EditorView.decorations.from(field),
});

window.pipelabEditor = (area, changed = () => {}) => {
  const view = new EditorView({
    doc: area.value,
    extensions: [
      lineNumbers(),
      history(),
      drawSelection(),
      bracketMatching(),
      indentOnInput(),
      indentUnit.of("    "),
      EditorState.tabSize.of(4),
      python(),
      syntaxHighlighting(classHighlighter),
      keymap.of([...defaultKeymap, ...historyKeymap, indentWithTab]),
      wrong,
      EditorView.contentAttributes.of({ id: area.id, tabindex: "0", "aria-label": area.ariaLabel }),
      EditorView.updateListener.of(({ docChanged, transactions }) => {
        if (docChanged && transactions.some((each) => each.annotation(Transaction.userEvent))) changed();
      }),
      // Who came by Tab, or pressed Escape, goes on to the next element with Tab.
      EditorView.domEventHandlers({
        focus: (_, each) => each.setTabFocusMode(true),
        click: (_, each) => each.setTabFocusMode(false),
        keydown: ({ key }, each) => {
          if (!["Tab", "Shift"].includes(key)) each.setTabFocusMode(key === "Escape");
        },
      }),
    ],
  });
  area.replaceWith(view.dom);
  return {
    get value() {
      return view.state.doc.toString();
    },
    set value(text) {
      view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: text } });
    },
    mark: (line) => view.dispatch({ effects: setWrong.of(line) }),
    focus: (options) => view.contentDOM.focus(options),
  };
};
