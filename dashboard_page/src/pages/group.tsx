// All samples of a group side by side, aligned by message. Messages that all samples share are shown once.
import type { ComponentChildren } from "preact";
import { type GroupAnswer, type Message, type Sample, type Tokens, apiPath, useResource } from "../api";
import { onlyFilters } from "../filters";
import { fixed, number, plural, words } from "../format";
import { useKeys } from "../keys";
import { useTick } from "../live";
import { Badge, Loaded, Panel } from "../parts/basic";
import { MessageBox } from "../parts/conversation";
import { TokenText } from "../parts/tokens";
import { go, href, useRoute } from "../router";
import { Fate, GroupHead, PayloadState } from "./rollout";

export function GroupPage() {
  const { parts, query } = useRoute();
  const id = parts[0] ?? "";
  const filters = onlyFilters(query);
  const answer = useResource<GroupAnswer>(apiPath(`groups/${encodeURIComponent(id)}`, filters), useTick(10_000));
  const open = (group: string | null | undefined) => group && go(href("group", [group], filters));
  useKeys({ j: () => open(answer.data?.next), k: () => open(answer.data?.previous), Enter: () => go(href("rollout", [id, 0], filters)) });
  return (
    <Loaded from={answer}>
      {(data) => (
        <>
          <GroupHead data={data} page="group" keep={filters} />
          <PayloadState data={data} />
          {data.samples.length ? <SideBySide id={id} data={data} filters={filters} /> : null}
          <Fate data={data} />
        </>
      )}
    </Loaded>
  );
}

function SideBySide({ id, data, filters }: { id: string; data: GroupAnswer; filters: Record<string, string> }) {
  const lists = data.samples.map((sample) => sample.messages ?? []);
  const shared = sharedPrefix(lists);
  const rows = Math.max(...lists.map((list) => list.length));
  const cells: ComponentChildren[] = [];
  let turn = lists[0]?.slice(0, shared).filter((message) => message.role === "assistant").length ?? 0;
  for (let row = shared; row < rows; row++) {
    const isTurn = lists.some((list) => list[row]?.role === "assistant");
    data.samples.forEach((sample, column) => {
      const message = lists[column]![row];
      cells.push(
        <div key={`${row}-${sample.sample}`} class="cell" style={{ gridColumn: String(column + 1), gridRow: String(row - shared + 2) }}>
          {message ? <MessageBox message={message} turn={message.role === "assistant" ? turn : null} timing={message.role === "assistant" ? sample.turns[turn] : undefined} isDivergence={row === shared && shared > 0} /> : null}
        </div>,
      );
    });
    if (isTurn) turn += 1;
  }
  return (
    <>
      {shared ? (
        <div class="turns">
          {lists[0]!.slice(0, shared).map((message, at) => (
            <MessageBox key={at} message={message} />
          ))}
          <p class="small muted">
            {shared === rows ? "All samples are identical." : `All ${data.samples.length} samples share the messages above${data.divergence.turn === null ? "" : ` and differ from turn ${data.divergence.turn + 1} on`}.`}
          </p>
        </div>
      ) : null}
      <div class="columns" tabIndex={0} role="region" aria-label="Samples side by side" style={{ gridTemplateColumns: `repeat(${data.samples.length}, minmax(240px, 1fr))` }}>
        {data.samples.map((sample, column) => (
          <a key={sample.sample} class="column-head" href={href("rollout", [id, sample.sample], filters)} style={{ gridColumn: String(column + 1), gridRow: "1" }}>
            <SampleHead sample={sample} />
          </a>
        ))}
        {rows === 0
          ? data.samples.map((sample, column) => (
              <div key={sample.sample} class="cell" style={{ gridColumn: String(column + 1), gridRow: "2" }}>
                <SampleTokens group={id} sample={sample.sample} />
              </div>
            ))
          : cells}
      </div>
    </>
  );
}

/** For rollout functions that record tokens and no messages. */
function SampleTokens({ group, sample }: { group: string; sample: number }) {
  const tokens = useResource<Tokens>(apiPath(`groups/${encodeURIComponent(group)}/tokens`, { sample }));
  return (
    <Panel>
      <Loaded from={tokens}>{(data) => <TokenText tokens={data} by="logprob" />}</Loaded>
    </Panel>
  );
}

function SampleHead({ sample }: { sample: Sample }) {
  return (
    <>
      <span class="row between">
        <b>Sample {sample.sample}</b>
        {sample.solved === null ? null : <Badge tone={sample.solved ? "good" : ""}>{sample.solved ? "solved" : "not solved"}</Badge>}
      </span>
      <span class="small muted">
        {sample.reward === null ? `not scored: ${sample.invalid_cause ?? ""}` : `reward ${fixed(sample.reward, 3)}`}
        {sample.advantage === null ? "" : `, advantage ${number(sample.advantage, 2)}`}, {plural(sample.num_trained, "token")}, {words(sample.end)}
      </span>
    </>
  );
}

/** How many messages at the beginning are the same in all samples. */
function sharedPrefix(lists: Message[][]): number {
  const texts = lists.map((list) => list.map((message) => JSON.stringify(message)));
  const first = texts[0] ?? [];
  let length = 0;
  while (length < first.length && texts.every((list) => list[length] === first[length])) length += 1;
  return length;
}
