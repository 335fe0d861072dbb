// Colours for canvases and charts, read from the style sheet, so that light and dark mode have one definition.
import { useEffect, useState } from "preact/hooks";

const dark = matchMedia("(prefers-color-scheme: dark)");

// Reading a computed style is slow, and a canvas needs thousands of colours.
const known = new Map<string, string>();
dark.addEventListener("change", () => known.clear());

export function colour(name: string): string {
  let value = known.get(name);
  if (value === undefined) {
    value = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    known.set(name, value);
  }
  return value;
}

export const SERIES = 8;

/** The colour of the n-th series of a chart. */
export function seriesColour(at: number): string {
  return colour(`series-${(at % SERIES) + 1}`);
}

/** Changes when the colour scheme changes: a dependency of everything that is drawn with `colour`. */
export function useScheme(): string {
  const [scheme, setScheme] = useState(dark.matches ? "dark" : "light");
  useEffect(() => {
    const update = () => setScheme(dark.matches ? "dark" : "light");
    dark.addEventListener("change", update);
    return () => dark.removeEventListener("change", update);
  }, []);
  return scheme;
}

/** A colour between two others, for heat maps. `share` is from 0 to 1. */
export function mix(from: string, to: string, share: number): string {
  const a = channels(from);
  const b = channels(to);
  const at = Math.min(1, Math.max(0, share));
  return `rgb(${a.map((value, i) => Math.round(value + ((b[i] ?? 0) - value) * at)).join(",")})`;
}

function channels(hex: string): number[] {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}
