// Lists the server's routes and the fields of their bodies, from its own description.
const key = sessionStorage.getItem("zinfer-api-key");
const answer = await fetch("openapi.json", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
const state = document.getElementById("state");

if (answer.ok) {
  const { paths } = await answer.json();
  state.textContent = "";
  for (const [path, operations] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(operations)) showRoute(path, method, operation);
  }
} else {
  state.className = "bad";
  state.textContent = answer.status === 401 ? "give the API key on the page of the server first" : "the server does not answer";
}

function showRoute(path, method, operation) {
  const schema = operation.requestBody?.content?.["application/json"]?.schema;
  const route = document.createElement(schema ? "details" : "p");
  const name = document.createElement(schema ? "summary" : "span");
  name.append(`${method.toUpperCase()} ${path}`);
  route.append(name);
  if (schema) route.append(tableOf(schema));
  document.getElementById("routes").append(route);
}

function tableOf(schema) {
  const table = document.createElement("table");
  for (const [field, kind] of Object.entries(schema.properties ?? {})) {
    const row = table.insertRow();
    row.insertCell().append(field);
    row.insertCell().append(schema.required?.includes(field) ? "required" : "");
    row.insertCell().append(typeOf(kind));
    row.insertCell().append(kind.description ?? "");
  }
  return table;
}

function typeOf(kind) {
  if (kind.anyOf) return kind.anyOf.map(typeOf).filter((each) => each !== "null").join(" or ");
  return kind.type === "array" ? `list of ${typeOf(kind.items ?? {})}` : kind.enum?.join(", ") ?? kind.type ?? "anything";
}
