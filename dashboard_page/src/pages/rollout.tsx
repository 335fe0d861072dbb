// One rollout: its conversation, tokens, rewards, and what became of it.
import { type GroupAnswer, type Runs, type Sample, type Tokens, type Turn, apiPath, useResource } from "../api";
import { onlyFilters } from "../filters";
import { clock, duration, fixed, number, plural, words } from "../format";
import { useKeys } from "../keys";
import { useTick } from "../live";
import { Notes, type Operator, useOperator } from "../parts/act";
import { Badge, Facts, Loaded, LongText, Notice, Panel, Segmented, State } from "../parts/basic";
import { Conversation } from "../parts/conversation";
import { type TokenColour, TokenView } from "../parts/tokens";
import { go, href, setFilters, useRoute } from "../router";
import { oneLine, visible } from "../text";

export function RolloutPage({ runs }: { runs: Runs }) {
  const operator = useOperator(runs);
  const { parts, query } = useRoute();
  const id = parts[0] ?? "";
  const wanted = Number(parts[1] ?? 0);
  const filters = onlyFilters(query);
  const answer = useResource<GroupAnswer>(apiPath(`groups/${encodeURIComponent(id)}`, filters), useTick(10_000));
  const samples = answer.data?.samples ?? [];
  const sample = samples[Math.min(Math.max(0, wanted), samples.length - 1)];
  // A rollout function may record tokens only.
  const view = query.get("view") === "tokens" || (sample && !sample.messages?.length) ? "tokens" : "conversation";
  const keep = { ...filters, view: query.get("view"), colour: query.get("colour") };
  const openGroup = (group: string | null | undefined) => group && go(href("rollout", [group, 0], keep));
  const openSample = (at: number) => at >= 0 && at < samples.length && go(href("rollout", [id, at], keep), { replace: true });
  useKeys({
    j: () => openGroup(answer.data?.next),
    k: () => openGroup(answer.data?.previous),
    l: () => openSample(wanted + 1),
    h: () => openSample(wanted - 1),
    t: () => setFilters({ view: view === "tokens" ? null : "tokens" }, { replace: true }),
    g: () => go(href("group", [id], filters)),
  });
  return (
    <Loaded from={answer}>
      {(data) => (
        <>
          <GroupHead data={data} page="rollout" keep={keep} />
          <PayloadState data={data} />
          {sample ? (
            <>
              <SampleTabs samples={samples} chosen={sample.sample} link={(at) => href("rollout", [id, at], keep)} />
              <div class="grid">
                <div class="span-8 stack">
                  <div class="row between">
                    <Segmented label="View" value={view} options={sample.messages?.length ? [["conversation", "Conversation"], ["tokens", "Tokens"]] : [["tokens", "Tokens (no messages were recorded)"]]} onChange={(next) => setFilters({ view: next === "tokens" ? next : null }, { replace: true })} />
                    <span class="small muted">
                      <kbd>j</kbd> <kbd>k</kbd> group, <kbd>h</kbd> <kbd>l</kbd> sample, <kbd>t</kbd> tokens, <kbd>g</kbd> side by side
                    </span>
                  </div>
                  {view === "tokens" ? <SampleTokens group={id} sample={sample} /> : <Conversation messages={sample.messages ?? []} turns={shownTurns(sample)} />}
                </div>
                <div class="span-4 stack">
                  <Lineage sample={sample} link={(sequence) => href("rollout", [id, sample.sample], { ...keep, view: "tokens", sequence: String(sequence) })} />
                  <SampleFacts sample={sample} data={data} operator={operator} />
                  <Notes key={`${id} ${sample.sample}`} group={id} sample={sample.sample} operator={operator} />
                  <Fate data={data} />
                </div>
              </div>
            </>
          ) : (
            <div class="grid">
              <div class="span-6">
                <Fate data={data} />
              </div>
            </div>
          )}
        </>
      )}
    </Loaded>
  );
}

/** The id of the group, its state, and its neighbours within the filter. */
export function GroupHead({ data, page, keep }: { data: GroupAnswer; page: "rollout" | "group"; keep: Record<string, string | null> }) {
  const { group } = data;
  const other = (id: string) => (page === "rollout" ? href("rollout", [id, 0], keep) : href("group", [id], keep));
  return (
    <div class="page-head between">
      <div class="row">
        <a href={href("rollouts", [], keep)}>Rollouts</a>
        <span class="muted">/</span>
        <h1 class="mono">{visible(group.group_id)}</h1>
        <State state={group.state} detail={group.drop_kind} />
        {group.step !== null ? <a href={href("steps", [group.step])}>step {group.step}</a> : null}
        {group.lag !== null ? <span class="muted">lag {group.lag}</span> : null}
      </div>
      <div class="row">
        {page === "rollout" ? (
          <a class="button" href={href("group", [group.group_id], keep)}>
            Side by side
          </a>
        ) : null}
        <Neighbour id={data.previous} link={other} label="Previous group within the filter (k)" sign="←" />
        <span class="muted small nowrap">{data.position === null ? "" : `${(data.position + 1).toLocaleString("en")} of ${data.total.toLocaleString("en")}`}</span>
        <Neighbour id={data.next} link={other} label="Next group within the filter (j)" sign="→" />
      </div>
    </div>
  );
}

function Neighbour({ id, link, label, sign }: { id: string | null; link: (id: string) => string; label: string; sign: string }) {
  return id === null ? (
    <button class="button" disabled aria-label={label}>
      {sign}
    </button>
  ) : (
    <a class="button" href={link(id)} aria-label={label} title={label}>
      {sign}
    </a>
  );
}

const PAYLOADS: Record<string, string> = {
  deleted: "The samples of this group were deleted by retention. Its summary and history are kept.",
  never: "No samples were stored for this group.",
  damaged: "The stored samples of this group cannot be read.",
};

export function PayloadState({ data }: { data: GroupAnswer }) {
  if (data.payload === "stored") return null;
  return <Notice tone={data.payload === "damaged" ? "bad" : "warn"}>{data.payload_problem ?? PAYLOADS[data.payload]}</Notice>;
}

function SampleTabs({ samples, chosen, link }: { samples: Sample[]; chosen: number; link: (at: number) => string }) {
  return (
    <nav class="sample-tabs" aria-label="Samples of the group">
      {samples.map((sample) => (
        <a key={sample.sample} href={link(sample.sample)} aria-current={sample.sample === chosen ? "true" : undefined}>
          <span class="muted">#{sample.sample}</span> {sample.reward === null ? "not scored" : fixed(sample.reward, 3)}
          {sample.solved ? <span class="dot good" role="img" aria-label="solved" /> : null}
        </a>
      ))}
    </nav>
  );
}

interface Branch { sequence: number; role: string; parent: number | null; agent: string | null; left_out: string | null }

/** The fact `lineage`, which any producer may have written. */
function branches(sample: Sample): Branch[] {
  const fact = sample.facts.lineage;
  if (!Array.isArray(fact)) return [];
  const text = (value: unknown) => (typeof value === "string" ? value : null);
  return fact.flatMap((entry) => {
    const sequence: unknown = entry?.sequence;
    if (typeof sequence !== "number" || sequence < 0 || sequence >= sample.sequences) return [];
    const parent: unknown = entry.parent;
    return [{ sequence, role: text(entry.role) ?? "?", parent: typeof parent === "number" ? parent : null, agent: text(entry.agent), left_out: text(entry.left_out) }];
  });
}

const CONTINUES = ["compaction", "rewrite", "retry", "turn"];

/** The turns of the conversation that is shown: not those of sub-agents and side requests. None if that is not known. */
function shownTurns(sample: Sample): Turn[] {
  const all = branches(sample);
  if (!all.length) return sample.turns.length <= (sample.messages ?? []).filter((message) => message.role === "assistant").length ? sample.turns : [];
  const owners = new Map<number, string>();
  for (const one of all) owners.set(one.sequence, CONTINUES.includes(one.role) ? (owners.get(one.parent ?? -1) ?? "main") : one.role);
  return sample.turns.filter((turn) => owners.get(turn.sequence) === "main");
}

/** The conversations of an episode: sub-agents, compactions, retries and side requests below the one that they came from. */
function Lineage({ sample, link }: { sample: Sample; link: (sequence: number) => string }) {
  const all = branches(sample);
  if (all.length < 2) return null;
  const shown = new Set<number>();
  const below = (parent: number | null) => {
    const children = all.filter((one) => one.parent === parent && !shown.has(one.sequence));
    for (const one of children) shown.add(one.sequence);
    if (!children.length) return null;
    return (
      <ul class="lineage">
        {children.map((one) => (
          <li key={one.sequence}>
            <a href={link(one.sequence)}>{visible(one.role)}</a>{" "}
            <span class="muted small">
              sequence {one.sequence + 1}, {plural(sample.turns.filter((turn) => turn.sequence === one.sequence).length, "turn")}
              {one.agent ? <span class="mono"> {visible(one.agent)}</span> : null}
            </span>
            {one.left_out ? <div class="small">Not trained: {visible(one.left_out)}</div> : null}
            {below(one.sequence)}
          </li>
        ))}
      </ul>
    );
  };
  return <Panel title="Conversations">{below(null)}</Panel>;
}

function SampleTokens({ group, sample }: { group: string; sample: Sample }) {
  const { query } = useRoute();
  const sequence = Number(query.get("sequence") ?? 0);
  const tokens = useResource<Tokens>(apiPath(`groups/${encodeURIComponent(group)}/tokens`, { sample: sample.sample, sequence }));
  return (
    <Panel>
      <Loaded from={tokens}>
        {(data) => (
          <div class="stack">
            {data.sequences > 1 ? (
              <div class="row">
                <span class="muted small">The episode has {plural(data.sequences, "sequence")}</span>
                <Segmented label="Sequence" value={String(data.sequence)} options={Array.from({ length: data.sequences }, (_, at) => [String(at), String(at + 1)] as const)} onChange={(at) => setFilters({ sequence: at }, { replace: true })} />
              </div>
            ) : null}
            {data.text === null ? <Notice tone="warn">The tokenizer of this run cannot be loaded here, so token ids are shown.</Notice> : null}
            <TokenView tokens={data} by={(query.get("colour") as TokenColour | null) ?? "logprob"} onColour={(by) => setFilters({ colour: by }, { replace: true })} />
          </div>
        )}
      </Loaded>
    </Panel>
  );
}

export function Fate({ data }: { data: GroupAnswer }) {
  // Sentences that begin with a time repeat the moves, which are listed below.
  const sentences = data.sentences.filter((sentence) => data.moves.length === 0 || !/^\d{4}-\d\d-\d\d /.test(sentence));
  return (
    <Panel title="What became of this group">
      <div class="stack">
        {sentences.map((sentence) => (
          <p key={sentence}>{visible(sentence)}</p>
        ))}
        {data.unusable ? <Notice tone="warn">Not usable for training: {visible(data.unusable)}</Notice> : null}
        {data.moves.length ? (
          <ol class="moves">
            {data.moves.map((move, at) => (
              <li key={at}>
                <time>{clock(move.at)}</time> <State state={move.to_state} />
                {move.note ? <span class="muted"> {visible(move.note)}</span> : null}
                {move.by && move.by !== move.note ? <span class="muted"> by {visible(move.by)}</span> : null}
              </li>
            ))}
          </ol>
        ) : null}
      </div>
    </Panel>
  );
}

interface JudgeNote { name: string; model: string; score: number | null; text: string }

/** What the judges said, by reward function. Facts may hold anything, so every level is checked. */
function judgesOf(value: unknown): JudgeNote[] {
  if (typeof value !== "object" || value === null || Array.isArray(value)) return [];
  return Object.entries(value).flatMap(([name, notes]) =>
    (Array.isArray(notes) ? notes : []).filter((note) => typeof note === "object" && note !== null).map((note) => ({
      name,
      model: String(note.model ?? ""),
      score: typeof note.score === "number" ? note.score : null,
      text: String(note.text ?? ""),
    })),
  );
}

function SampleFacts({ sample, data, operator }: { sample: Sample; data: GroupAnswer; operator: Operator }) {
  const rewards = Object.entries(sample.rewards);
  const facts = Object.entries(sample.facts).filter(([name]) => name !== "judges");
  const judges = judgesOf(sample.facts.judges);
  const metrics = Object.entries(sample.metrics);
  const task = Object.entries(data.task ?? {});
  return (
    <>
      <Panel title={`Sample ${sample.sample}`} more={sample.solved === null ? undefined : <Badge tone={sample.solved ? "good" : ""}>{sample.solved ? "solved" : "not solved"}</Badge>}>
        <Facts
          rows={[
            ["reward", sample.reward === null ? <span class="warn">not scored: {visible(sample.invalid_cause ?? "")}</span> : <b>{number(sample.reward, 4)}</b>],
            ...rewards.map(([name, value]): [string, string] => [`reward: ${words(name)}`, number(value, 4)]),
            ["advantage", number(sample.advantage, 3)],
            ...(sample.teacher_gap === null ? [] : ([["teacher − policy", `${number(sample.teacher_gap, 3)} nats a token`]] as [string, string][])),
            ["ended by", words(sample.end)],
            ["tokens", `${number(sample.num_tokens)}, ${number(sample.num_trained)} trained`],
            ["turns", number(sample.turns.length)],
            ...(sample.turns.some((turn) => turn.reward !== null) ? ([["rewards of turns", oneLine(sample.turns.map((turn) => number(turn.reward)).join("; "), 400)]] as [string, string][]) : []),
            ...(sample.score_s === null ? [] : ([["scored in", duration(sample.score_s)]] as [string, string][])),
            ["sampled by", data.publications.length ? `publication ${data.publications.join(", ")}` : "–"],
            ...metrics.map(([name, value]): [string, string] => [words(name).replace("/", ": "), number(value, 3)]),
          ]}
        />
      </Panel>
      {judges.length ? (
        <Panel title="Judges">
          {judges.map((judge, at) => (
            <article key={at} class="judge">
              <header>
                {words(judge.name)}: <b>{number(judge.score, 3)}</b> <span class="mono">{visible(judge.model)}</span>
              </header>
              <LongText text={judge.text} />
            </article>
          ))}
        </Panel>
      ) : null}
      {facts.length ? (
        <Panel title="Facts from the environment">
          <Facts rows={facts.map(([name, value]) => [words(name), oneLine(typeof value === "string" ? value : JSON.stringify(value), 400)])} />
        </Panel>
      ) : null}
      <Panel title="Task" more={
          <span class="row">
            {operator.isOperator ? <a href={href("actions", [], { quarantine: data.group.task_id })}>quarantine</a> : null}
            <a href={href("rollouts", [], { task: data.group.task_id })}>all its groups</a>
          </span>
        }
      >
        <Facts rows={[["id", <span class="mono">{visible(data.group.task_id)}</span>], ["draw", data.group.draw], ["attempts", data.attempts], ...task.filter(([name]) => name !== "id").map(([name, value]): [string, string] => [words(name), oneLine(typeof value === "string" ? value : JSON.stringify(value), 400)])]} />
      </Panel>
    </>
  );
}

