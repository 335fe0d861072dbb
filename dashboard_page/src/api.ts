// The shapes that the server returns (`rollbook/dashboard/server`), and how they are fetched.
import { useEffect, useRef, useState } from "preact/hooks";

type N = number | null;

export interface RunRow { key: string; name: string; source: string; path: string; state: RunState; created: N; last_step: N; total_steps: N; reward: N; problem: string | null }
export type RunState = "running" | "finished" | "stopped" | "unreadable";
export interface Runs { runs: RunRow[]; target: string; allow_actions: boolean; version: string }

export interface Trend { last: N; first_tenth: N; last_tenth: N }
export interface Problem { severity: "error" | "warning" | "info"; kind: string; text: string; link: string | null }
export interface Audit { at: number; ok: boolean; violations: number | string[]; opened?: number; steps?: number; max_lag?: N; seconds?: number }
export interface Evaluation { step: number; tasks: number; reward: N; solved: N; low: N; high: N; reward_low: N; reward_high: N }
export interface Overview {
  key: string; name: string; source: string; path: string; state: RunState; created: N; now: number; problem: string | null;
  progress: { step: N; total_steps: N; durable_step: N; version: N; seconds_per_step: N; eta_s: N; elapsed_s: N };
  learning: { reward: Trend; solved: Trend; response_tokens: Trend; entropy: Trend; kl: Trend; has_reference_kl: boolean; evaluation: Evaluation | null };
  flow: { trainer_utilisation: N; tokens_per_s: N; in_flight: N; queued: N; capacity: N; gate: string | null; waits: string | null; sentence: string | null };
  freshness: { bound: N; lag_max: N; lag_mean: N; policy: string | null };
  law: { opened: number; by_state: Record<string, number>; dropped: Record<string, number>; unusable: number; holds: boolean } | null;
  audit: Audit | null;
  problems: Problem[];
  processes: { name: string; pid: N; state: string; restarts: number; ready: boolean; alive: boolean }[];
  sparklines: Record<string, N[]>;
  actions: ActionState;
}

export interface Points { x: number[]; y: N[]; low: N[] | null; high: N[] | null; count: number }
export interface Metric { name: string; unit: string; meaning: string; process: string; last: N }
export interface SeriesAnswer { metrics: Metric[]; series: Record<string, Points> }

export type Span = [start: number, end: number, name: string, row: number, facts: Record<string, unknown>];
export interface Lane { id: string; label: string; kind: string; rows: number; spans: Span[]; density: { edges: number[]; busy: number[] } | null }
export interface Mark { at: number; kind: string; label: string; step: N }
export interface TimelineAnswer { from: number; to: number; begin: number; end: number; is_complete: boolean; lanes: Lane[]; marks: Mark[] }

export interface StepRow { step: number; time: N; reward: N; solved: N; lag_max: N; lag_mean: N; wait_s: N; train_s: N; tokens: N; response_tokens: N; truncated: N; entropy: N; kl: N; step_kl?: N; loss: N; grad_norm: N; groups: N; is_durable: boolean }
export interface Steps { steps: StepRow[]; next_before: N }
export interface AnatomySample { sample: number; reward: N; solved: boolean | null; tokens: N; turns: N; end: string | null; start: N; finish: N; parts: [string, number, number][]; versions: number[] }
export interface AnatomyGroup { group_id: string; task_id: string; state: string; reward_mean: N; lag: N; oldest_version: N; unusable: string | null; opened_at: N; queued_at: N; batched_at: N; trained_at: N; samples: AnatomySample[] }
export interface Anatomy { step: number; decided_at: N; trained_at: N; previous: N; next: N; metrics: Record<string, N>; begin: N; end: N; groups: AnatomyGroup[] }

export interface Freshness {
  bound: N; policy: string | null; groups_per_step: N; max_in_flight: N; capacity: N;
  heat: { steps: number[]; step_size: number; lags: number[]; counts: number[][] };
  series: Record<string, Points>;
  cost: { wait_s: N; train_s: N; wait_share: N; stale_dropped: N; stale_share: N; stale_tokens: N; sentence: string | null };
}

export interface Law {
  opened: number; holds: boolean;
  states: { state: string; count: number; filter: string }[];
  drops: { kind: string; count: number; meaning: string; filter: string }[];
  origins?: { origin: string; count: number }[];
  links: { from: string; to: string; count: number }[];
  audit: Audit | null;
}

export interface SampleRow { reward: N; tokens: N; turns: N; end: string | null; solved: boolean | null; seconds: N }
export interface GroupRow {
  sequence: number; group_id: string; task_id: string; task_text: string | null; tier: string | null; draw: number; state: string; drop_kind: string | null; drop_reason: string | null; step: N; lag: N; opened_at: N; attempt: number; origin: string; producer: string | null;
  num_samples: number; reward_mean: N; reward_std: N; solved_rate: N; tokens: N; turns: N; seconds: N; truncated_rate: N; has_payload: boolean; samples: SampleRow[];
}
export interface Groups {
  groups: GroupRow[]; total: number; total_all: number; next_cursor: string | null;
  histogram: { edges: number[]; counts: number[]; all: number[] };
  facets: Record<string, Record<string, number>>;
  searched: { groups: number; is_complete: boolean } | null;
  index: { indexed: number; total: number; is_complete: boolean };
}

export interface Message { role: string; content: string; reasoning: string | null; tool_calls: { id: string | null; name: string; arguments: string }[]; tool_call_id: string | null; name: string | null }
export interface Turn { sequence: number; start: number; end: number; seconds: N; queue_s: N; generate_s: N; act_s: N; reward: N }
export interface Sample {
  sample: number; reward: N; solved: boolean | null; end: string; invalid_cause: string | null; num_tokens: number; num_trained: number; metrics: Record<string, N>; rewards: Record<string, N>; facts: Record<string, unknown>; advantage: N; teacher_gap: N;
  messages: Message[] | null; sequences: number; turns: Turn[]; score_s: N;
}
export interface GroupAnswer {
  group: GroupRow; previous: string | null; next: string | null; position: N; total: number; sentences: string[];
  moves: { at: N; from_state: string | null; to_state: string; note: string | null; by: string | null }[];
  oldest_version: N; admission_version: N; publications: number[]; unusable: string | null; attempts: number; invalid_causes: Record<string, number>;
  payload: "stored" | "deleted" | "never" | "damaged"; payload_problem: string | null; task: Record<string, unknown> | null; samples: Sample[]; divergence: { turn: N };
}
export interface Tokens {
  sample: number; sequence: number; sequences: number; count: number; text: string[] | null; ids: number[]; logprob: N[]; version: number[]; publication: number[];
  author: { names: string[]; at: number[] }; mask: number[]; advantage: N[] | null; entropy: N[] | null; trainer_logprob: N[] | null; teacher_logprob: N[] | null; recorded_step: N;
}

export interface TaskRow { task_id: string; task_text: string | null; tier: string | null; draws: number; reward_mean: N; solved_rate: N; last_solved_rate: N; dropped: number; tokens: N; last_step: N }
export interface Tasks {
  tasks: TaskRow[]; total: number; never_solved: number; next_cursor: string | null;
  tiers: { name: string; tasks: number; is_open: boolean; graduated_share: N; rate: N }[];
  mastery: Record<string, { draws: number[]; rate: N[]; graduated: N[] }>;
}
export interface Fleet {
  processes: { name: string; role: string; pid: N; state: string; restarts: number; alive: boolean; memory_bytes: N; cpu_s: N; last_event: { time: number; event: string } | null }[];
  replicas: { name: string; url: string | null; publication: N; busy_share: N; tokens_per_s: N; last_generate: N }[];
  workers: { worker: number; pid: N; ready_at: N; alive: boolean }[];
  producers: { name: string; weight: N; min_share: N; credit: N; num_batched: N }[];
  gauges: Record<string, N>;
}
export interface Health {
  events: { time: number; level: string; process: string; event: string; text: string }[];
  failures: { cause: string; count: number; file: string | null }[];
  stderr: { process: string; lines: string[] }[];
  stacks: { time: number; process: string; text: string }[];
  restarts: { time: number; process: string; code: N }[];
  silent: { process: string; silent_s: number }[];
  skipped_lines: Record<string, number>;
}
export interface Config {
  sections: { name: string; fields: { path: string; value: unknown; default: unknown; is_default: boolean; meaning: string; resumed_from: unknown }[] }[];
  toml: string;
  resumes: { at: N; changed: Record<string, [unknown, unknown]> }[];
}
export interface Compare { runs: RunRow[]; series: Record<string, Record<string, Points>>; config: Record<string, Record<string, unknown>> }
export interface ActionState { gate: string | null; paused: boolean; draining: boolean; checkpoint_requested: N; quarantined: string[]; count: number }
export interface ActionRow { number: number; kind: string; author: string; at: number; target: string; sample: N; note: string }
export interface Actions extends ActionState { actions: ActionRow[] }

export class ApiError extends Error {
  constructor(readonly status: number, readonly type: string, message: string) {
    super(message);
  }
}

export function apiPath(path: string, query: URLSearchParams | Record<string, string | number | null | undefined> = {}): string {
  const all = new URLSearchParams();
  const entries = query instanceof URLSearchParams ? [...query] : Object.entries(query);
  for (const [name, value] of entries) if (value !== null && value !== undefined && value !== "") all.set(name, String(value));
  const run = new URLSearchParams(location.search).get("run");
  if (run && !all.has("run")) all.set("run", run);
  return `/api/${path}${all.size ? `?${all}` : ""}`;
}

export async function request<T>(path: string, init: RequestInit = {}): Promise<T> {
  let response: Response;
  try {
    response = await fetch(path, { credentials: "same-origin", ...init });
  } catch (error) {
    if ((error as Error).name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "The dashboard does not answer. It may have been stopped; the run itself continues without it.");
  }
  if (response.status === 204) return undefined as T;
  const body: unknown = await response.json().catch(() => null);
  if (response.ok && body !== null) return body as T;
  const error = (body as { error?: { type: string; message: string } } | null)?.error;
  throw new ApiError(response.status, error?.type ?? "error", error?.message ?? `The dashboard answered with status ${response.status}.`);
}

export function post<T>(path: string, body: unknown): Promise<T> {
  return request<T>(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

export interface Resource<T> {
  data: T | null;
  error: ApiError | null;
  isLoading: boolean;
  reload: () => void;
}

/**
 * Fetch `path` now, when it changes, and when the run has changed (`tick`). A path of null fetches nothing.
 *
 * The last data stays visible while the next is loading and after a failed refresh. A refresh waits for the running request:
 * aborting it would starve requests that are slower than the ticks.
 */
export function useResource<T>(path: string | null, tick = 0): Resource<T> {
  const [state, setState] = useState<{ path: string | null; data: T | null; error: ApiError | null }>({ path: null, data: null, error: null });
  const [isLoading, setLoading] = useState(path !== null);
  const running = useRef<{ path: string; abort: AbortController; isOutdated: boolean } | null>(null);

  const load = (wanted: string) => {
    const current = { path: wanted, abort: new AbortController(), isOutdated: false };
    running.current?.abort.abort();
    running.current = current;
    setLoading(true);
    const finish = (next: (old: typeof state) => typeof state) => {
      if (running.current !== current) return;
      running.current = null;
      setState(next);
      setLoading(false);
      if (current.isOutdated) load(wanted);
    };
    request<T>(wanted, { signal: current.abort.signal }).then(
      (data) => finish(() => ({ path: wanted, data, error: null })),
      (error: Error) => {
        if (error.name !== "AbortError") finish((old) => ({ path: wanted, data: old.path === wanted ? old.data : null, error: error as ApiError }));
      },
    );
  };

  useEffect(() => {
    if (path === null) return;
    if (running.current?.path === path) running.current.isOutdated = true;
    else load(path);
  }, [path, tick]);
  useEffect(
    () => () => {
      running.current?.abort.abort();
      running.current = null;
    },
    [],
  );
  return { ...state, isLoading: isLoading || state.path !== path, reload: () => path !== null && load(path) };
}

export interface More<T> {
  pages: T[];
  error: ApiError | null;
  isLoading: boolean;
  load: (path: string) => void;
}

/** The pages after the first one of `path`. They are forgotten when `path` changes, also one that arrives later. */
export function useMore<T>(path: string): More<T> {
  const none = { path, pages: [] as T[], error: null as ApiError | null, isLoading: false };
  const [state, setState] = useState(none);
  useEffect(() => setState(none), [path]);
  const current = state.path === path ? state : none;
  const load = (wanted: string) => {
    setState({ ...current, error: null, isLoading: true });
    const change = (next: Partial<typeof none>) => setState((old) => (old.path === path ? { ...old, ...next, isLoading: false } : old));
    request<T>(wanted).then(
      (page) => change({ pages: [...current.pages, page] }),
      (error: ApiError) => change({ error }),
    );
  };
  return { pages: current.pages, error: current.error, isLoading: current.isLoading, load };
}
