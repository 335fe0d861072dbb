import { useLayoutEffect } from "preact/hooks";

/** Run `actions[key]` when a key is pressed outside of a text field. */
export function useKeys(actions: Record<string, () => void>): void {
  // Before the next event, so that a quick key press does not run an old action.
  useLayoutEffect(() => {
    const listen = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName)) return;
      // Enter on a focused link or button keeps its own meaning.
      if (event.key === "Enter" && /^(A|BUTTON)$/.test(target.tagName)) return;
      const action = actions[event.key];
      if (!action) return;
      event.preventDefault();
      action();
    };
    addEventListener("keydown", listen);
    return () => removeEventListener("keydown", listen);
  });
}
