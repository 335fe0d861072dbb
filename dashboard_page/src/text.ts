// Model output is untrusted text. It is never parsed as HTML; characters that would be invisible or reorder the line are shown by name.
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]/g;

export function visible(text: string): string {
  return text.replace(INVISIBLE, (character) => {
    const code = character.codePointAt(0)!;
    if (code === 0x1b) return "⟨ESC⟩";
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** A token, with its white space made visible where it would not be seen. */
export function visibleToken(text: string): string {
  return visible(text).replaceAll("\n", "↵\n");
}

/** One line for a list. */
export function oneLine(text: string, limit = 120): string {
  const line = visible(text.slice(0, 4 * limit)).replace(/\s+/g, " ").trim();
  return line.length > limit ? `${line.slice(0, limit)}…` : line;
}
