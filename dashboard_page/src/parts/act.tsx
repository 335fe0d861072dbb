// Acting on a run: who may, the operator's token and name, and an action with its confirmation.
import { useState } from "preact/hooks";
import { type ActionRow, type Runs, apiPath, post, useResource } from "../api";
import { clock, dateTime } from "../format";
import { Notice } from "./basic";
import { visible } from "../text";

const AUTHOR = "rollbook.author";

export interface Operator {
  /** The dashboard was started with --allow-actions. */
  isAllowed: boolean;
  /** This browser has sent the operator's token. */
  isOperator: boolean;
  reload: () => void;
}

export function useOperator(runs: Runs): Operator {
  const session = useResource<{ role: string | null }>(runs.allow_actions ? "/api/session" : null);
  return { isAllowed: runs.allow_actions, isOperator: session.data?.role === "operator", reload: session.reload };
}

export function useAuthor(): [string, (name: string) => void] {
  const [author, setAuthor] = useState(() => localStorage.getItem(AUTHOR) ?? "");
  const store = (name: string) => {
    localStorage.setItem(AUTHOR, name);
    setAuthor(name);
  };
  return [author, store];
}

export function AuthorInput({ author, onChange }: { author: string; onChange: (name: string) => void }) {
  return (
    <label class="form-field">
      <span>Your name</span>
      <input type="text" value={author} maxLength={128} placeholder="recorded with every action" onInput={(event) => onChange((event.target as HTMLInputElement).value)} />
    </label>
  );
}

export function OperatorLogin({ onDone }: { onDone: () => void }) {
  const [error, setError] = useState<string | null>(null);
  const submit = async (event: SubmitEvent) => {
    event.preventDefault();
    try {
      await post("/api/login", { token: new FormData(event.target as HTMLFormElement).get("operator-token") });
      onDone();
    } catch (failure) {
      setError((failure as Error).message);
    }
  };
  return (
    <form class="stack" onSubmit={submit}>
      <label for="operator-token">To act on the run, enter the operator token. The dashboard printed the name of its file when it started.</label>
      <div class="row">
        <input id="operator-token" name="operator-token" type="password" autocomplete="off" required />
        <button class="button primary">Unlock</button>
      </div>
      {error ? <Notice tone="bad">{error}</Notice> : null}
    </form>
  );
}

export interface Wanted {
  kind: string;
  title: string;
  effect: string;
  target?: string;
  sample?: number;
  isDangerous?: boolean;
}

/** Says what an action does, takes a note, and does it. */
export function Confirm({ wanted, author, onClose }: { wanted: Wanted; author: string; onClose: (isDone: boolean) => void }) {
  const [note, setNote] = useState("");
  const [error, setError] = useState<string | null>(null);
  const [isSending, setSending] = useState(false);
  const submit = async (event: SubmitEvent) => {
    event.preventDefault();
    setSending(true);
    try {
      await post(apiPath("actions"), { kind: wanted.kind, author: author.trim(), target: wanted.target ?? "", sample: wanted.sample ?? null, note: note.trim() });
      onClose(true);
    } catch (failure) {
      setError((failure as Error).message);
      setSending(false);
    }
  };
  return (
    <form class="confirm stack" onSubmit={submit} aria-label={wanted.title}>
      <p>
        <b>{wanted.title}?</b> {wanted.effect}
      </p>
      <label class="form-field">
        <span>Why (optional)</span>
        <input type="text" value={note} maxLength={2000} onInput={(event) => setNote((event.target as HTMLInputElement).value)} />
      </label>
      {author.trim() ? null : <Notice tone="warn">Enter your name first: it is recorded with the action.</Notice>}
      {error ? <Notice tone="bad">{error}</Notice> : null}
      <div class="row">
        <button class={`button ${wanted.isDangerous ? "danger" : "primary"}`} disabled={isSending || !author.trim()}>
          {wanted.title}
        </button>
        <button type="button" class="button" onClick={() => onClose(false)}>
          Cancel
        </button>
      </div>
    </form>
  );
}

/** Notes about a group, and the form for a new one. */
export function Notes({ group, sample, operator }: { group: string; sample: number; operator: Operator }) {
  const [author, setAuthor] = useAuthor();
  const [note, setNote] = useState("");
  const [error, setError] = useState<string | null>(null);
  const notes = useResource<{ actions: ActionRow[] }>(apiPath("actions", { target: group }));
  const submit = async (event: SubmitEvent) => {
    event.preventDefault();
    try {
      await post(apiPath("actions"), { kind: "annotate", author: author.trim(), target: group, sample, note: note.trim() });
      setNote("");
      setError(null);
      notes.reload();
    } catch (failure) {
      setError((failure as Error).message);
    }
  };
  const found = notes.data?.actions ?? [];
  if (found.length === 0 && !operator.isOperator) return null;
  return (
    <section class="panel" aria-label="Notes">
      <div class="panel-head">
        <h2>Notes</h2>
      </div>
      <div class="stack">
        {found.map((one) => (
          <p key={one.number}>
            <span class="muted" title={dateTime(one.at)}>
              {visible(one.author)}, {clock(one.at)}
              {one.sample === null ? "" : `, sample ${one.sample}`}:
            </span>{" "}
            {visible(one.note)}
          </p>
        ))}
        {operator.isOperator ? (
          <form class="stack" onSubmit={submit}>
            <AuthorInput author={author} onChange={setAuthor} />
            <label class="form-field">
              <span>Note about sample {sample}</span>
              <textarea rows={2} maxLength={10_000} value={note} onInput={(event) => setNote((event.target as HTMLTextAreaElement).value)} />
            </label>
            {error ? <Notice tone="bad">{error}</Notice> : null}
            <div class="row">
              <button class="button primary" disabled={!note.trim() || !author.trim()}>
                Add the note
              </button>
            </div>
          </form>
        ) : null}
      </div>
    </section>
  );
}
