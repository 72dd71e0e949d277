#include "apps/line_editor.h"

#include <histedit.h>
#include <langinfo.h>

#include <clocale>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace pagedkv::apps {

struct LineEditor::Impl {
  EditLine* editor = nullptr;
  History* history = nullptr;
  HistEvent event{};
  std::string prompt;
  bool interrupted = false;

  ~Impl() {
    if (editor) el_end(editor);
    if (history) history_end(history);
  }

  static Impl& of(EditLine* editor) {
    void* data = nullptr;
    el_get(editor, EL_CLIENTDATA, &data);
    return *static_cast<Impl*>(data);
  }
  static char* show_prompt(EditLine* editor) { return of(editor).prompt.data(); }
  static unsigned char interrupt(EditLine* editor, int) {
    of(editor).interrupted = true;
    return CC_NEWLINE;
  }
};

LineEditor::LineEditor() : impl_(std::make_unique<Impl>()) {
  std::setlocale(LC_CTYPE, "");
  if (std::strcmp(nl_langinfo(CODESET), "UTF-8") != 0) std::setlocale(LC_CTYPE, "C.UTF-8");
  impl_->editor = el_init("pagedkv", stdin, stderr, stderr);
  impl_->history = history_init();
  if (!impl_->editor || !impl_->history)
    throw std::runtime_error("the terminal cannot be used for editing lines");
  EditLine* editor = impl_->editor;
  history(impl_->history, &impl_->event, H_SETSIZE, 1000);
  el_set(editor, EL_CLIENTDATA, impl_.get());
  el_set(editor, EL_PROMPT, &Impl::show_prompt);
  el_set(editor, EL_EDITOR, "emacs");
  el_set(editor, EL_SIGNAL, 1);  // a signal that ends the program leaves the terminal as it was
  el_set(editor, EL_HIST, history, impl_->history);
  // Ctrl-C comes as a character, not as a signal, while a line is edited.
  el_set(editor, EL_ADDFN, "interrupt-line", "End the line and forget it", &Impl::interrupt);
  el_set(editor, EL_BIND, "^C", "interrupt-line", nullptr);
  el_set(editor, EL_SETTY, "-d", "-isig", nullptr);
  el_set(editor, EL_BIND, "\\e[1;5D", "ed-prev-word", nullptr);  // Ctrl-Left, Ctrl-Right
  el_set(editor, EL_BIND, "\\e[1;5C", "em-next-word", nullptr);
  el_source(editor, nullptr);
}

LineEditor::~LineEditor() = default;

LineEditor::Read LineEditor::read(const std::string& prompt, std::string& line) {
  impl_->prompt = prompt;
  impl_->interrupted = false;
  int length = 0;
  const char* text = el_gets(impl_->editor, &length);
  if (impl_->interrupted) {
    std::fputc('\n', stderr);
    return Read::kInterrupted;
  }
  if (!text || length <= 0) return Read::kEnd;
  line.assign(text, static_cast<size_t>(length));
  if (line.back() == '\n') line.pop_back();
  return Read::kLine;
}

void LineEditor::remember(const std::string& text) {
  history(impl_->history, &impl_->event, H_ENTER, text.c_str());
}

}  // namespace pagedkv::apps
