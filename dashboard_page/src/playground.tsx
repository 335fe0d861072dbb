// `rollbook env play`: one environment, played by hand. The page is a client of the environment server's protocol.
import { render } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import "./style.css";
import { duration, number, words } from "./format";
import { Badge, Empty, Facts, LongText, Notice, Panel } from "./parts/basic";
import { oneLine, visible } from "./text";

interface TaskRow {
  id: string;
  tier: string | null;
  description: string;
  task: Record<string, unknown>;
}
interface Offer {
  name: string;
  description: string;
  tasks: TaskRow[];
  num_tasks: number;
  limits: { max_steps: number | null; step_s: number; idle_s: number };
}
interface Entry {
  kind: "action" | "observation" | "error";
  text: string;
  reward?: number;
}
interface Episode {
  title: string;
  entries: Entry[];
  steps: number;
  reward: number;
  isDone: boolean;
  solved: boolean | null;
  facts: Record<string, unknown>;
}
interface Reply {
  type: string;
  data: { observation?: Record<string, unknown>; reward?: number | null; done?: boolean; metadata?: Record<string, unknown>; code?: string; message?: string };
}

function App() {
  const [offer, setOffer] = useState<Offer | null>(null);
  const [problem, setProblem] = useState<string | null>(null);
  useEffect(() => {
    fetch(`/web/tasks${location.search}`)
      .then((response) => (response.ok ? response.json() : Promise.reject(new Error(`the server answered with status ${response.status}`))))
      .then((found: Offer) => {
        document.title = `${found.name} · Rollbook playground`;
        setOffer(found);
      })
      .catch((error: Error) => setProblem(`The tasks cannot be loaded: ${error.message}`));
  }, []);
  if (problem) return <Notice tone="bad">{problem}</Notice>;
  if (!offer)
    return (
      <div class="loading" role="status">
        Loading…
      </div>
    );
  return <Game offer={offer} />;
}

function Game({ offer }: { offer: Offer }) {
  const [episode, setEpisode] = useState<Episode | null>(null);
  const [status, setStatus] = useState<"idle" | "waiting" | "ready" | "closed">("idle");
  const [problem, setProblem] = useState<string | null>(null);
  const socket = useRef<WebSocket | null>(null);
  const end = useRef<HTMLDivElement>(null);
  useEffect(() => end.current?.scrollIntoView({ block: "nearest" }), [episode?.entries.length]);

  const receive = ({ type, data }: Reply) => {
    if (type === "error") {
      setEpisode((old) => old && { ...old, entries: [...old.entries, { kind: "error", text: `${data.code}: ${data.message}` }] });
      setStatus("ready");
    }
    if (type !== "observation") return;
    const seen = data.observation ?? {};
    const text = typeof seen.text === "string" ? seen.text : JSON.stringify(seen, null, 2);
    setEpisode((old) => old && { ...old, entries: [...old.entries, { kind: "observation", text, reward: data.reward ?? 0 }], reward: old.reward + (data.reward ?? 0), isDone: Boolean(data.done), solved: typeof seen.solved === "boolean" ? seen.solved : null, facts: data.metadata ?? {} });
    setStatus("ready");
  };
  const start = (row: TaskRow) => {
    setProblem(null);
    setStatus("waiting");
    setEpisode({ title: row.id || "custom task", entries: [], steps: 0, reward: 0, isDone: false, solved: null, facts: {} });
    const send = (open: WebSocket) => open.send(JSON.stringify({ type: "reset", data: { task: row.task } }));
    if (socket.current?.readyState === WebSocket.OPEN) return send(socket.current);
    const next = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/ws${location.search}`);
    socket.current = next;
    next.onopen = () => send(next);
    next.onmessage = (event) => receive(JSON.parse(event.data as string) as Reply);
    next.onclose = () => {
      if (socket.current !== next) return;
      setStatus("closed");
      setProblem("The session is closed. It was idle for too long, or another window uses the environment. Choose a task to begin again.");
    };
  };
  const act = (action: string) => {
    setEpisode((old) => old && { ...old, steps: old.steps + 1, entries: [...old.entries, { kind: "action", text: action }] });
    setStatus("waiting");
    socket.current?.send(JSON.stringify({ type: "step", data: { action } }));
  };
  return (
    <div class="play">
      <header class="bar">
        <span class="run-name">{offer.name}</span>
        <span class="muted clip-line">{offer.description}</span>
        <span class="bar-progress small">
          {offer.limits.max_steps ? `at most ${offer.limits.max_steps} steps, ` : ""}
          {duration(offer.limits.step_s)} per step, closed after {duration(offer.limits.idle_s)} without an action
        </span>
      </header>
      <main class="play-grid">
        <TaskList offer={offer} chosen={episode?.title ?? null} onStart={start} />
        <section class="stack" aria-label="Episode">
          <h1>{episode ? visible(episode.title) : "Choose a task to begin"}</h1>
          {problem ? <Notice tone="warn">{problem}</Notice> : null}
          {episode ? (
            <>
              <div class="turns" role="log" aria-live="polite" aria-label="Transcript">
                {episode.entries.map((entry, at) => (
                  <EntryBox key={at} entry={entry} />
                ))}
                {status === "waiting" ? <p class="muted">Waiting for the environment…</p> : null}
              </div>
              {episode.isDone ? (
                <Notice tone={episode.solved === false ? "warn" : "good"} title={episode.solved === null ? "Done." : episode.solved ? "Solved." : "Not solved."}>
                  Reward {number(episode.reward, 4)} after {episode.steps} steps.
                </Notice>
              ) : (
                <ActionForm isEnabled={status === "ready"} onAct={act} />
              )}
              <div ref={end} />
            </>
          ) : (
            <Panel>
              <Empty title="No episode yet.">Choose a task on the left, then type what an agent would reply.</Empty>
            </Panel>
          )}
        </section>
        <aside class="stack">{episode ? <Score episode={episode} /> : null}</aside>
      </main>
    </div>
  );
}

function TaskList({ offer, chosen, onStart }: { offer: Offer; chosen: string | null; onStart: (row: TaskRow) => void }) {
  const [like, setLike] = useState("");
  const [problem, setProblem] = useState<string | null>(null);
  const own = useRef<HTMLTextAreaElement>(null);
  const tiers = useMemo(() => {
    const found = new Map<string, TaskRow[]>();
    for (const row of offer.tasks) {
      if (!`${row.id} ${row.description}`.toLowerCase().includes(like.toLowerCase())) continue;
      const tier = row.tier ?? "tasks";
      found.set(tier, [...(found.get(tier) ?? []), row]);
    }
    return found;
  }, [offer, like]);
  const startOwn = () => {
    try {
      const task = JSON.parse(own.current!.value || "{}") as Record<string, unknown>;
      setProblem(null);
      onStart({ id: typeof task.id === "string" ? task.id : "", tier: null, description: "", task });
    } catch (error) {
      setProblem(`This is not JSON: ${(error as Error).message}`);
    }
  };
  return (
    <nav class="task-list" aria-label="Tasks">
      {offer.tasks.length > 8 ? <input type="search" aria-label="Find a task" placeholder={`Find one of ${offer.num_tasks} tasks`} value={like} onInput={(event) => setLike((event.target as HTMLInputElement).value)} /> : null}
      {[...tiers].map(([tier, rows], at) => (
        <details key={tier} open={at === 0 || like !== ""}>
          <summary>
            <b>{words(tier)}</b> <span class="muted">{rows.length}</span>
          </summary>
          {rows.map((row) => (
            <button key={row.id} class="task" aria-pressed={row.id === chosen} onClick={() => onStart(row)}>
              <b class="mono">{visible(row.id)}</b>
              {row.description ? <span>{oneLine(row.description, 180)}</span> : null}
            </button>
          ))}
        </details>
      ))}
      <details open={offer.tasks.length === 0}>
        <summary>
          <b>Your own task</b>
        </summary>
        <div class="stack">
          <textarea ref={own} rows={6} class="mono" aria-label="Task as a JSON object" defaultValue={JSON.stringify(offer.tasks[0]?.task ?? {}, null, 2)} />
          {problem ? <Notice tone="bad">{problem}</Notice> : null}
          <button class="button" onClick={startOwn}>
            Begin
          </button>
        </div>
      </details>
    </nav>
  );
}

function EntryBox({ entry }: { entry: Entry }) {
  return (
    <article class={`message ${entry.kind === "action" ? "assistant" : entry.kind === "error" ? "tool" : "user"}`}>
      <header>
        <b>{entry.kind === "action" ? "you" : entry.kind === "error" ? "error" : "environment"}</b>
        {entry.reward ? <Badge tone={entry.reward > 0 ? "good" : "bad"}>reward {number(entry.reward, 4)}</Badge> : null}
      </header>
      <LongText text={entry.text} />
    </article>
  );
}

function ActionForm({ isEnabled, onAct }: { isEnabled: boolean; onAct: (action: string) => void }) {
  const field = useRef<HTMLTextAreaElement>(null);
  useEffect(() => {
    if (isEnabled) field.current?.focus();
  }, [isEnabled]);
  const submit = (event: Event) => {
    event.preventDefault();
    const action = field.current!.value;
    if (!isEnabled || action.trim() === "") return;
    field.current!.value = "";
    onAct(action);
  };
  return (
    <form class="act" onSubmit={submit}>
      <textarea
        ref={field}
        rows={1}
        class="mono"
        aria-label="Your action"
        placeholder="What an agent would reply. Enter sends, Shift+Enter adds a line."
        onKeyDown={(event: KeyboardEvent) => {
          if (event.key === "Enter" && !event.shiftKey) submit(event);
        }}
      />
      <button class="button primary" disabled={!isEnabled}>
        Send
      </button>
    </form>
  );
}

/** Reward, its parts, limits, and what the environment reports about its state. */
function Score({ episode }: { episode: Episode }) {
  const { facts } = episode;
  const parts = ["goals", "keeps", "rewards", "parts"].flatMap((name) => (isTable(facts[name]) ? Object.entries(facts[name]).map(([part, value]) => [name, part, value] as const) : []));
  const limit = typeof facts.move_limit === "number" ? ` of ${facts.move_limit}` : "";
  const price = typeof facts.hint_price === "number" ? facts.hint_price : null;
  const rest = Object.entries(facts).filter(([name, value]) => !isTable(value) && !["move_limit", "moves", "hint_price", "hints"].includes(name));
  const tables = Object.entries(facts).filter(([name, value]) => isTable(value) && !["goals", "keeps", "rewards", "parts"].includes(name)) as [string, Record<string, unknown>][];
  return (
    <>
      <Panel title="Score">
        <Facts
          rows={[
            ["reward", <b>{number(episode.reward, 4)}</b>],
            ["steps", `${episode.steps}${limit}`],
            ...(price === null ? [] : ([["hints", `${number(Number(facts.hints ?? 0))} used; each multiplies the reward by ${price}`]] as [string, string][])),
          ]}
        />
        {parts.length ? (
          <ul class="parts">
            {parts.map(([group, part, value]) => (
              <li key={`${group} ${part}`}>
                {typeof value === "boolean" ? <Badge tone={value ? "good" : ""}>{value ? "holds" : group === "keeps" ? "broken" : "open"}</Badge> : <Badge>{number(Number(value))}</Badge>} {visible(part)}
              </li>
            ))}
          </ul>
        ) : null}
      </Panel>
      {tables.map(([name, table]) => (
        <Panel key={name} title={`${words(name)} now`}>
          {Object.keys(table).length ? <Facts rows={Object.entries(table).map(([key, value]) => [visible(key), <code>{oneLine(text(value), 200)}</code>])} /> : <p class="muted">none</p>}
        </Panel>
      ))}
      {rest.length ? (
        <Panel title="For viewers only" more="may contain the solution">
          <details>
            <summary>Show</summary>
            <Facts rows={rest.map(([name, value]) => [words(name), oneLine(text(value), 300)])} />
          </details>
        </Panel>
      ) : null}
    </>
  );
}

function isTable(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function text(value: unknown): string {
  return typeof value === "string" ? value : JSON.stringify(value);
}

render(<App />, document.getElementById("app")!);
