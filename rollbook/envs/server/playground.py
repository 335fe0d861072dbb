"""A web page to play one environment by hand: `rollbook env play`. It is a client of the same protocol.

Only for a pool of one environment: on a training server each visitor would occupy an environment that episodes need.
"""

import html

from aiohttp import web

from rollbook.contracts.errors import RunError

PATH = "/web"


def mount_playground(app: web.Application, *, capacity: int, name: str) -> None:
    if capacity > 1:
        raise RunError(
            f"the playground needs a pool of one environment, but this server has {capacity} sessions; "
            "use a pool of 1, or disable the playground"
        )
    page = PAGE.replace("ENV_NAME", html.escape(name))

    async def show(_: web.Request) -> web.Response:
        return web.Response(text=page, content_type="text/html")

    async def home(_: web.Request) -> web.Response:
        raise web.HTTPFound(PATH)

    app.router.add_get(PATH, show)
    app.router.add_get("/", home)


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>ENV_NAME: playground</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
  :root { color-scheme: light dark; --line: #8884; --soft: #8882; --good: #2a8; --bad: #c54 }
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
  h1 { font-size: 1.2rem } textarea, input { font: 14px/1.4 ui-monospace, monospace; width: 100%; box-sizing: border-box;
  padding: .5rem; border: 1px solid var(--line); border-radius: 6px; background: transparent; color: inherit }
  button { padding: .45rem 1rem; border: 1px solid var(--line); border-radius: 6px; background: var(--soft); color: inherit }
  .row { display: flex; gap: .5rem; margin: .6rem 0 } .row > :first-child { flex: 1 }
  #log { border: 1px solid var(--line); border-radius: 6px; padding: .5rem 1rem; min-height: 14rem; white-space: pre-wrap;
  font: 14px/1.5 ui-monospace, monospace; overflow-wrap: anywhere }
  .you { opacity: .7 } .you::before { content: "> " } .error { color: var(--bad) } .paid { color: var(--good) }
</style></head><body>
<h1>ENV_NAME</h1>
<label for="task">Task (a JSON object)</label>
<textarea id="task" rows="3">{}</textarea>
<div class="row"><span id="status">connecting</span><button id="reset">Reset</button></div>
<div id="log" role="log" aria-live="polite"></div>
<form class="row" id="act">
<input id="action" placeholder="what you do" autocomplete="off" aria-label="action"><button>Step</button></form>
<script>
(() => {
const $ = id => document.getElementById(id);
const say = (text, kind) => { const line = document.createElement("div"); line.className = kind || ""; line.textContent = text;
  $("log").append(line); line.scrollIntoView({block: "nearest"}); };
let socket, steps = 0, total = 0;
const status = text => { $("status").textContent = text; };
function connect() {
  socket = new WebSocket((location.protocol === "https:" ? "wss://" : "ws://") + location.host + "/ws" + location.search);
  socket.onopen = () => status("connected: reset to begin");
  socket.onclose = () => status("not connected: reset connects again (the session may be in use)");
  socket.onmessage = event => {
    const {type, data} = JSON.parse(event.data);
    if (type === "error") return say(data.code + ": " + data.message, "error");
    if (type !== "observation") return;
    const seen = data.observation;
    say(typeof seen.text === "string" ? seen.text : JSON.stringify(seen, null, 2));
    total += data.reward || 0;
    if (data.reward) say("reward " + data.reward, "paid");
    status(steps + " steps, reward " + total + (data.done ? ", done" + (seen.solved ? ", solved" : "") : ""));
  };
}
function send(type, data) { socket.send(JSON.stringify({type, data})); }
$("reset").onclick = () => {
  let task;
  try { task = JSON.parse($("task").value || "{}"); } catch (error) { return say("the task is not JSON: " + error, "error"); }
  $("log").textContent = ""; steps = 0; total = 0;
  if (socket.readyState === WebSocket.OPEN) return send("reset", {task});
  connect(); socket.addEventListener("open", () => send("reset", {task}), {once: true});
};
$("act").onsubmit = event => { event.preventDefault(); const action = $("action").value; $("action").value = "";
  if (socket.readyState !== WebSocket.OPEN) return status("not connected: press Reset");
  steps += 1; say(action, "you"); send("step", {action}); };
connect();
})();
</script></body></html>
"""
