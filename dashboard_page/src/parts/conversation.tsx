// The messages of a rollout: text, reasoning, tool calls and their results.
import type { Message, Turn } from "../api";
import { duration, number, plural } from "../format";
import { visible } from "../text";
import { Badge, LongText } from "./basic";

/** The last turn is the last answer: a prompt may begin with answers that were not sampled, and a rewritten history has lost some. */
export function Conversation({ messages, turns }: { messages: Message[]; turns: Turn[] }) {
  let turn = turns.length - messages.filter((message) => message.role === "assistant").length - 1;
  return (
    <div class="turns">
      {messages.map((message, at) => {
        if (message.role === "assistant") turn += 1;
        const own = message.role === "assistant" && turn >= 0 ? turn : null;
        return <MessageBox key={at} message={message} turn={own} timing={own === null ? undefined : turns[own]} />;
      })}
    </div>
  );
}

export function MessageBox({ message, turn, timing, isDivergence }: { message: Message; turn?: number | null; timing?: Turn; isDivergence?: boolean }) {
  const role = ["assistant", "user", "system", "tool"].includes(message.role) ? message.role : "other";
  return (
    <article class={`message ${role}`}>
      <header>
        <b>{visible(message.role)}</b>
        {message.name ? <span class="mono">{visible(message.name)}</span> : null}
        {turn !== null && turn !== undefined ? <span>turn {turn + 1}</span> : null}
        {isDivergence ? <Badge tone="warn">samples differ from here</Badge> : null}
        {timing ? <span class="timing">{timingText(timing)}</span> : null}
      </header>
      {message.reasoning ? (
        <details class="reasoning" open={message.reasoning.length < 2000}>
          <summary>reasoning</summary>
          <LongText text={message.reasoning} />
        </details>
      ) : null}
      {message.content ? <LongText text={message.content} /> : message.tool_calls.length || message.reasoning ? null : <pre class="muted">(empty)</pre>}
      {message.tool_calls.map((call, at) => (
        <div class="tool-call" key={at}>
          <header>
            tool call <b class="mono">{visible(call.name)}</b>
          </header>
          <LongText text={pretty(call.arguments)} />
        </div>
      ))}
    </article>
  );
}

function timingText(turn: Turn): string {
  const parts = ([["queued", turn.queue_s], ["generated", turn.generate_s], ["acted", turn.act_s]] as const).filter(([, seconds]) => seconds !== null && seconds !== undefined);
  const details = parts.map(([name, seconds]) => `${name} ${duration(seconds)}`).join(", ");
  const reward = turn.reward === null || turn.reward === undefined ? "" : `, reward ${number(turn.reward)}`;
  return `${plural(turn.end - turn.start, "token")}${reward}${details ? `, ${details}` : turn.seconds ? `, ${duration(turn.seconds)}` : ""}`;
}

/** Arguments of a tool call are JSON as a rule, but the model may write anything. */
function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
