// Sends a prompt, and hands on the parts of the answer as they come.

// Returns the number of tokens; an Error has the server's own words. `call.signal` ends the request on the server too.
export async function ask(call, take) {
  const isChat = call.kind === "chat";
  const asked = isChat ? { messages: call.messages } : { prompt: call.prompt };
  const answer = await fetch(isChat ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...call.headers },
    body: JSON.stringify({ ...asked, ...call.options, stream: true, stream_options: { include_usage: true } }),
    signal: call.signal,
  });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  let numTokens = 0;
  for await (const event of events(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    for (const choice of event.choices) take(isChat ? choice.delta.content ?? "" : choice.text);
    numTokens = event.usage?.completion_tokens ?? numTokens;
  }
  return numTokens;
}

// Yields the objects of a stream of server-sent events.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
