// The tokens of one sequence, coloured by one of their properties. The strip above the text shows all tokens at a glance.
import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Tokens } from "../api";
import { number } from "../format";
import { colour, mix } from "../theme";
import { visible, visibleToken } from "../text";
import { useIsVisible } from "../visible";
import { Segmented } from "./basic";
import { Canvas, type Point } from "./canvas";

export type TokenColour = "logprob" | "version" | "author" | "advantage" | "entropy" | "gap" | "teacher";
const NAMES: Record<TokenColour, string> = { logprob: "logprob", version: "version", author: "author", advantage: "advantage", entropy: "entropy", gap: "trainer–engine gap", teacher: "teacher" };
const CHUNK = 500;
const LEVELS = 8;

/** The class of each token: `h0`–`h8` for magnitudes, `p`/`n` for signs, `c0`–`c7` for categories. */
function classes(tokens: Tokens, by: TokenColour): string[] {
  const level = (value: number | null | undefined, full: number, kind = "h") => (value === null || value === undefined ? "" : `${kind}${Math.min(LEVELS, Math.round((Math.abs(value) / full) * LEVELS))}`);
  const oldest = oldestVersion(tokens);
  const most = (tokens.advantage ?? []).reduce<number>((largest, value) => Math.max(largest, Math.abs(value ?? 0)), 1e-9);
  return tokens.ids.map((_, at) => {
    switch (by) {
      case "logprob":
        return tokens.version[at]! < 0 ? "" : level(tokens.logprob[at], 4);
      case "version":
        return tokens.version[at]! < 0 ? "" : `c${(tokens.version[at]! - oldest) % LEVELS}`;
      case "author":
        return `c${(tokens.author.at[at] ?? 0) % LEVELS}`;
      case "advantage": {
        const value = tokens.advantage?.[at];
        return value ? level(value, most, value > 0 ? "p" : "n") : "";
      }
      case "entropy":
        return level(tokens.entropy?.[at], 3);
      case "gap":
        return level(gap(tokens, at), 0.5);
      case "teacher": {
        const value = difference(tokens.teacher_logprob?.[at], tokens.logprob[at]);
        return value === null ? "" : level(value, 3, value > 0 ? "p" : "n");
      }
    }
  });
}

function gap(tokens: Tokens, at: number): number | null {
  return difference(tokens.trainer_logprob?.[at], tokens.logprob[at]);
}

function difference(one: number | null | undefined, other: number | null | undefined): number | null {
  return one === null || one === undefined || other === null || other === undefined ? null : one - other;
}

function oldestVersion(tokens: Tokens): number {
  return tokens.version.reduce((oldest, version) => (version >= 0 ? Math.min(oldest, version) : oldest), Infinity);
}

/** The text of the tokens, in chunks that are drawn when they come near the screen: a rollout may have many thousand tokens. */
export function TokenText({ tokens, by }: { tokens: Tokens; by: TokenColour }) {
  const kinds = useMemo(() => classes(tokens, by), [tokens, by]);
  const starts = Array.from({ length: Math.ceil(tokens.count / CHUNK) }, (_, at) => at * CHUNK);
  return (
    <div class="tokens">
      {starts.map((start) => (
        <Chunk key={start} tokens={tokens} kinds={kinds} start={start} />
      ))}
    </div>
  );
}

function Chunk({ tokens, kinds, start }: { tokens: Tokens; kinds: string[]; start: number }) {
  const [box, isVisible] = useIsVisible("600px");
  const end = Math.min(start + CHUNK, tokens.count);
  const isShort = tokens.count <= 2 * CHUNK;
  const [height, setHeight] = useState(0);
  const isDrawn = isVisible || isShort;
  useEffect(() => {
    if (isDrawn) setHeight((box.current as HTMLElement).offsetHeight);
  }, [isDrawn]);
  // An estimate for chunks that were never drawn: about a line for every 12 tokens.
  const room = height || Math.ceil((end - start) / 12) * 21;
  return (
    <div ref={box as preact.RefObject<HTMLDivElement | null>} data-start={start} style={isDrawn ? {} : { height: `${room}px` }}>
      {isDrawn
        ? Array.from({ length: end - start }, (_, offset) => {
            const at = start + offset;
            return (
              <span key={at} data-at={at} class={`${kinds[at]}${tokens.mask[at] ? "" : " masked"}`}>
                {visibleToken(tokens.text?.[at] ?? `[${tokens.ids[at]}]`)}
              </span>
            );
          })
        : null}
    </div>
  );
}

export function TokenView({ tokens, by, onColour }: { tokens: Tokens; by: TokenColour; onColour: (by: TokenColour) => void }) {
  const [hovered, setHovered] = useState<number | null>(null);
  const text = useRef<HTMLDivElement>(null);
  const kinds = useMemo(() => classes(tokens, by), [tokens, by]);
  const options = (Object.keys(NAMES) as TokenColour[]).filter((name) => (name === "advantage" ? tokens.advantage : name === "entropy" ? tokens.entropy : name === "gap" ? tokens.trainer_logprob : name === "teacher" ? tokens.teacher_logprob : true));
  const jump = (at: number) => text.current?.querySelector(`[data-start="${Math.floor(at / CHUNK) * CHUNK}"]`)?.scrollIntoView({ block: "start" });
  return (
    <div class="stack">
      <div class="row between">
        <Segmented label="Colour tokens by" value={by} options={options.map((name) => [name, NAMES[name]] as const)} onChange={onColour} />
        <span class="small muted">{tokens.recorded_step === null ? "" : `trainer values of step ${tokens.recorded_step}`}</span>
      </div>
      <Legend tokens={tokens} by={by} />
      <Strip tokens={tokens} kinds={kinds} by={by} onPick={jump} />
      <p class="token-fact" aria-live="off">
        {hovered === null ? <span class="muted">Point at a token to read its values. Grey tokens are not trained.</span> : <TokenFact tokens={tokens} at={hovered} />}
      </p>
      <div
        ref={text}
        onPointerOver={(event: PointerEvent) => {
          const at = (event.target as HTMLElement).dataset.at;
          setHovered(at === undefined ? null : Number(at));
        }}
        onPointerLeave={() => setHovered(null)}
      >
        <TokenText tokens={tokens} by={by} />
      </div>
    </div>
  );
}

function TokenFact({ tokens, at }: { tokens: Tokens; at: number }) {
  const parts = [
    `token ${at}`,
    `id ${tokens.ids[at]}`,
    tokens.author.names[tokens.author.at[at] ?? 0] ?? "",
    tokens.mask[at] ? "trained" : "not trained",
    tokens.version[at]! >= 0 ? `version ${tokens.version[at]}` : "",
    tokens.version[at]! >= 0 && tokens.logprob[at] !== null ? `logprob ${number(tokens.logprob[at])} (p ${number(Math.exp(tokens.logprob[at]!))})` : "",
    tokens.advantage?.[at] ? `advantage ${number(tokens.advantage[at])}` : "",
    tokens.entropy && tokens.entropy[at] !== null ? `entropy ${number(tokens.entropy[at])}` : "",
    gap(tokens, at) !== null ? `trainer − engine ${number(gap(tokens, at))}` : "",
    tokens.teacher_logprob?.[at] !== null && tokens.teacher_logprob?.[at] !== undefined ? `teacher's logprob ${number(tokens.teacher_logprob[at])}` : "",
  ];
  return (
    <>
      <code>{visible(JSON.stringify(tokens.text?.[at] ?? ""))}</code> {parts.filter(Boolean).join(" · ")}
    </>
  );
}

function Legend({ tokens, by }: { tokens: Tokens; by: TokenColour }) {
  const entries: [string, string][] =
    by === "author"
      ? tokens.author.names.map((name, at) => [`c${at % LEVELS}`, name])
      : by === "version"
        ? [...new Set(tokens.version.filter((version) => version >= 0))].sort((a, b) => a - b).slice(0, 12).map((version) => [`c${(version - oldestVersion(tokens)) % LEVELS}`, `version ${version}`])
        : by === "advantage"
          ? [["n8", "worse than its group"], ["p8", "better than its group"]]
          : by === "teacher"
            ? [["n8", "the teacher would rarely say it"], ["p8", "the teacher says it more often"]]
            : by === "gap"
            ? [["h1", "the trainer agrees"], ["h8", "differs by 0.5 or more"]]
            : by === "entropy"
              ? [["h1", "certain"], ["h8", "3 nats or more"]]
              : [["h1", "likely"], ["h8", "logprob −4 or less"]];
  return (
    <ul class="legend tokens">
      {entries.map(([kind, label]) => (
        <li key={label}>
          <span class={`swatch ${kind}`} /> {label}
        </li>
      ))}
    </ul>
  );
}

/** All tokens as narrow cells in one row: several tokens share a pixel in long rollouts. */
function Strip({ tokens, kinds, by, onPick }: { tokens: Tokens; kinds: string[]; by: TokenColour; onPick: (at: number) => void }) {
  const at = ({ x, width }: Point) => Math.min(tokens.count - 1, Math.floor((x / width) * tokens.count));
  const draw = useCallback(
    (pen: CanvasRenderingContext2D, w: number, h: number) => {
      const ground = colour("heat-0");
      const paints = new Map<string, string>();
      const paint = (kind: string) => {
        let found = paints.get(kind);
        if (found === undefined) {
          const share = Number(kind.slice(1)) / LEVELS;
          found = kind === "" ? ground : kind[0] === "c" ? colour(`series-${Number(kind.slice(1)) + 1}`) : mix(ground, colour(kind[0] === "p" ? "good" : kind[0] === "n" ? "bad" : "warm"), share);
          paints.set(kind, found);
        }
        return found;
      };
      // Where several tokens share a pixel, the strongest colour is shown.
      const columns = Math.min(tokens.count, Math.max(1, Math.floor(w)));
      const cell = w / columns;
      const wide = cell > 4 ? cell - 1 : cell + 0.3;
      for (let column = 0; column < columns; column++) {
        let strongest = "";
        let isTrained = false;
        const end = Math.floor(((column + 1) * tokens.count) / columns);
        for (let i = Math.floor((column * tokens.count) / columns); i < end; i++) {
          if (kinds[i]! > strongest) strongest = kinds[i]!;
          isTrained ||= Boolean(tokens.mask[i]);
        }
        pen.fillStyle = paint(strongest);
        pen.fillRect(column * cell, 0, wide, h - 5);
        if (isTrained) {
          pen.fillStyle = colour("ink");
          pen.fillRect(column * cell, h - 3, wide, 2);
        }
      }
    },
    [tokens, kinds],
  );
  return <Canvas label={`${tokens.count} tokens coloured by ${NAMES[by]}; the line below marks the ${tokens.mask.filter(Boolean).length} trained tokens`} height={26} draw={draw} onClick={(point) => onPick(at(point))} />;
}
