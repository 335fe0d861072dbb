// The filters of the rollout list. Their names are those of the API, and they are kept in the address of every page that uses them.
import { words } from "./format";

export const FILTERS = ["state", "drop", "step", "task", "task_like", "tier", "reward", "solved", "tokens", "turns", "lag", "end", "seconds", "origin", "producer", "text", "order"] as const;
export type FilterName = (typeof FILTERS)[number];

export const LABELS: Record<FilterName, string> = {
  state: "state", drop: "drop reason", step: "step", task: "task", task_like: "task id contains", tier: "tier", reward: "reward", solved: "solved", tokens: "response tokens", turns: "turns", lag: "lag", end: "a sample ended by",
  seconds: "seconds", origin: "origin", producer: "producer", text: "text", order: "order",
};

/** Only the filters of an address, without the selected sample or run. */
export function onlyFilters(query: URLSearchParams): Record<string, string> {
  const found: Record<string, string> = {};
  for (const name of FILTERS) {
    const value = query.get(name);
    if (value) found[name] = value;
  }
  return found;
}

/** A filter in words: `0.2:` is "from 0.2". */
export function filterText(name: FilterName, value: string): string {
  if (["reward", "tokens", "turns", "lag", "seconds"].includes(name)) {
    const [low, high] = value.split(":", 2);
    const range = low && high ? (low === high ? low : `${low} to ${high}`) : low ? `from ${low}` : `up to ${high ?? ""}`;
    return `${LABELS[name]} ${range}`;
  }
  return `${LABELS[name]}: ${name === "task" || name === "text" || name === "task_like" ? value : words(value).replaceAll(",", ", ")}`;
}

/** Add a value to a comma list, or remove it. */
export function toggled(list: string | null, value: string): string | null {
  const values = new Set((list ?? "").split(",").filter(Boolean));
  if (!values.delete(value)) values.add(value);
  return values.size ? [...values].join(",") : null;
}
