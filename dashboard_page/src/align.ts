import type { Points } from "./api";

export type Column = (number | null)[];

/** Series with different x values, on the union of their x values. */
export function align(parts: (Points | undefined)[]): { x: number[]; columns: Column[] } {
  const x = [...new Set(parts.flatMap((part) => part?.x ?? []))].sort((a, b) => a - b);
  const columns = parts.map((part) => {
    const known = new Map(part?.x.map((at, i) => [at, part.y[i] ?? null]));
    return x.map((at) => known.get(at) ?? null);
  });
  return { x, columns };
}
