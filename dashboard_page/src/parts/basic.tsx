// Small parts that every page uses.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { More, Resource } from "../api";
import { NONE, words } from "../format";
import { oneLine, visible } from "../text";

type Children = { children?: ComponentChildren };
export type Tone = "good" | "warn" | "bad" | "info" | "";

export function Page({ title, about, aside, children }: { title: string; about?: ComponentChildren; aside?: ComponentChildren } & Children) {
  return (
    <>
      <div class="page-head">
        <h1>{title}</h1>
        {about ? <p>{about}</p> : null}
        {aside}
      </div>
      {children}
    </>
  );
}

export function Panel({ title, more, span, flush, children }: { title?: string; more?: ComponentChildren; span?: number; flush?: boolean } & Children) {
  return (
    <section class={`panel ${span ? `span-${span}` : ""} ${flush ? "flush" : ""}`} aria-label={title}>
      {title ? (
        <div class="panel-head">
          <h2>{title}</h2>
          {more ? <span class="more muted">{more}</span> : null}
        </div>
      ) : null}
      {children}
    </section>
  );
}

export function Stat({ label, value, unit, note, link, tone = "", children }: { label: string; value: ComponentChildren; unit?: ComponentChildren; note?: ComponentChildren; link?: string; tone?: Tone } & Children) {
  const body = (
    <>
      <div class="stat-label">{label}</div>
      <div class={`stat-value ${tone}`}>
        {value} {unit ? <small>{unit}</small> : null}
      </div>
      {note ? <div class="stat-note">{note}</div> : null}
      {children}
    </>
  );
  return link ? (
    <a class="stat" href={link}>
      {body}
    </a>
  ) : (
    <div class="stat">{body}</div>
  );
}

export function Badge({ tone = "", children }: { tone?: Tone } & Children) {
  return <span class={`badge ${tone}`}>{children}</span>;
}

/** A cell: what the task asks, with the id below; the id alone where the text is not known. */
export function NamedTask({ text, id, link }: { text: string | null; id: string; link: string }) {
  return (
    <td class="named">
      <a class={text ? "" : "mono"} href={link} title={visible(text ?? id)}>
        {text ? oneLine(text, 160) : visible(id)}
      </a>
      {text ? (
        <span class="mono" title={visible(id)}>
          {visible(id)}
        </span>
      ) : null}
    </td>
  );
}

const STATE_TONES: Record<string, Tone> = { dispatched: "info", queued: "info", batched: "info", trained: "good", durable: "good", dropped: "warn", running: "good", finished: "info", stopped: "warn", unreadable: "bad", failed: "bad", restarting: "warn", starting: "info" };

export function State({ state, detail }: { state: string | null; detail?: string | null }) {
  if (!state) return <>{NONE}</>;
  return (
    <Badge tone={STATE_TONES[state] ?? ""}>
      {state}
      {detail ? `: ${words(detail)}` : ""}
    </Badge>
  );
}

export function Meter({ share, label, tone = "" }: { share: number | null; label: string; tone?: string }) {
  const width = Math.round(Math.min(1, Math.max(0, share ?? 0)) * 1000) / 10;
  return (
    <div class="meter" role="meter" aria-label={label} aria-valuemin={0} aria-valuemax={100} aria-valuenow={width}>
      <i class={tone} style={{ width: `${width}%` }} />
    </div>
  );
}

export function Empty({ title, children }: { title: string } & Children) {
  return (
    <div class="empty">
      <b>{title}</b>
      {children}
    </div>
  );
}

export function Notice({ tone, title, children }: { tone: Tone; title?: string } & Children) {
  return (
    <div class={`notice ${tone}`} role={tone === "bad" ? "alert" : "status"}>
      {title ? <b>{title}</b> : null}
      <span>{children}</span>
    </div>
  );
}

/** A button for the next page of a list, and why it could not be loaded. */
export function LoadMore<T>({ more, path, label }: { more: More<T>; path: string; label: string }) {
  return (
    <div class="load-more">
      {more.error ? <Notice tone="bad">{more.error.message}</Notice> : null}
      <button class="button" disabled={more.isLoading} onClick={() => more.load(path)}>
        {more.isLoading ? "Loading…" : more.error ? "Try again" : label}
      </button>
    </div>
  );
}

/** The data of a resource, or why there is none. */
export function Loaded<T>({ from, children }: { from: Resource<T>; children: (data: T) => ComponentChildren }) {
  if (from.data === null) {
    if (from.error) {
      return (
        <Notice tone="bad" title="Not available.">
          {from.error.message}{" "}
          <button class="button" onClick={from.reload}>
            Try again
          </button>
        </Notice>
      );
    }
    return (
      <div class="loading" role="status">
        Loading…
      </div>
    );
  }
  return (
    <>
      {from.error ? (
        <Notice tone="warn" title="These values are no longer updated.">
          {from.error.message}
        </Notice>
      ) : null}
      {children(from.data)}
    </>
  );
}

export function Segmented<T extends string>({ label, value, options, onChange }: { label: string; value: T; options: readonly (readonly [T, string])[]; onChange: (value: T) => void }) {
  return (
    <div class="segmented" role="group" aria-label={label}>
      {options.map(([option, text]) => (
        <button key={option} aria-pressed={option === value} onClick={() => onChange(option)}>
          {text}
        </button>
      ))}
    </div>
  );
}

/** A small line without axes. */
export function Spark({ values, tone = 1, range }: { values: (number | null)[] | undefined; tone?: number; range?: [number, number] }) {
  const known = (values ?? []).filter((value): value is number => value !== null);
  if (!values || known.length < 2) return <svg class="spark" viewBox="0 0 100 30" aria-hidden="true" />;
  const low = range?.[0] ?? Math.min(...known);
  const high = range?.[1] ?? Math.max(...known);
  const scale = high > low ? 26 / (high - low) : 0;
  const points = values.map((value, i) => (value === null ? null : `${((i / (values.length - 1)) * 100).toFixed(2)},${(28 - (value - low) * scale).toFixed(2)}`)).filter(Boolean);
  return (
    <svg class="spark" viewBox="0 0 100 30" preserveAspectRatio="none" aria-hidden="true">
      <polyline points={points.join(" ")} fill="none" stroke={`var(--series-${tone})`} stroke-width="1.5" vector-effect="non-scaling-stroke" stroke-linejoin="round" />
    </svg>
  );
}

export function Facts({ rows }: { rows: [string, ComponentChildren][] }) {
  return (
    <dl class="facts">
      {rows.map(([name, value]) => [<dt key={name}>{name}</dt>, <dd>{value}</dd>])}
    </dl>
  );
}

/** Long text, shown up to a limit: a message may have many megabytes. It is always inserted as text. */
export function LongText({ text, limit = 20_000 }: { text: string; limit?: number }) {
  const [shown, setShown] = useState(limit);
  return (
    <>
      <pre>{visible(text.length > shown ? text.slice(0, shown) : text)}</pre>
      {text.length > shown ? (
        <button class="more" onClick={() => setShown(shown + 10 * limit)}>
          Show more: {(text.length - shown).toLocaleString("en")} characters are hidden
        </button>
      ) : null}
    </>
  );
}
