// Shows the OpenAPI document of this server. Everything in it reaches the page as textContent, never as markup.
"use strict";
(() => {
  const page = document.querySelector("main");
  const METHODS = ["get", "post", "put", "patch", "delete"];
  const BOUNDS = [
    ["minimum", "≥ "], ["exclusiveMinimum", "> "], ["maximum", "≤ "], ["exclusiveMaximum", "< "],
    ["minLength", "characters ≥ "], ["maxLength", "characters ≤ "], ["minItems", "items ≥ "], ["maxItems", "items ≤ "],
    ["minProperties", "entries ≥ "], ["maxProperties", "entries ≤ "],
  ];

  const make = (name, parent, text, className) => {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    parent.append(element);
    return element;
  };
  // A sentence in which `names` stand between backquotes.
  const tell = (name, parent, text, className) => {
    const element = make(name, parent, "", className);
    (text || "").split("`").forEach((part, number) => {
      if (number % 2) make("code", element, part);
      else element.append(part);
    });
  };
  const link = (parent, text, target) => { make("a", parent, text).href = "#" + target; };
  const nameOf = (ref) => ref.slice(ref.lastIndexOf("/") + 1);

  // Writes a schema's type as text and links to named schemas; null is left out, as it means absent.
  const writeType = (parent, schema) => {
    if (schema.$ref) return link(parent, nameOf(schema.$ref), "schema-" + nameOf(schema.$ref));
    const choices = schema.anyOf || schema.oneOf;
    if (choices) {
      choices.filter((each) => each.type !== "null").forEach((each, number) => {
        if (number) parent.append(" or ");
        writeType(parent, each);
      });
      return;
    }
    if (schema.const !== undefined) return parent.append(JSON.stringify(schema.const));
    if (schema.enum) return parent.append(schema.enum.map((each) => JSON.stringify(each)).join(" or "));
    if (schema.type === "array") {
      parent.append("list of ");
      writeType(parent, schema.items || {});
    } else parent.append(schema.type || "anything");
    const bounds = BOUNDS.filter(([key]) => schema[key] !== undefined).map(([key, sign]) => sign + schema[key]);
    if (bounds.length) parent.append(" (" + bounds.join(", ") + ")");
  };

  const fieldTable = (parent, rows) => {
    const table = make("table", parent);
    for (const { name, schema, isNeeded, text } of rows) {
      const row = make("tr", table);
      const head = make("th", row);
      make("code", head, name);
      if (isNeeded) make("span", head, " needed", "soft");
      writeType(make("td", row), schema);
      tell("td", row, text || schema.description, "soft");
    }
  };
  const fieldsOf = (schema) => Object.entries(schema.properties || {}).map(([name, each]) => ({
    name, schema: each, isNeeded: (schema.required || []).includes(name),
  })).sort((a, b) => b.isNeeded - a.isNeeded);

  const writeSchema = (parent, schema) => {
    if (schema.properties) return fieldTable(parent, fieldsOf(schema));
    writeType(make("p", parent), schema);
    if (schema["x-event"]) {
      const line = make("p", parent, "Each event: ");
      writeType(line, schema["x-event"]);
    }
  };

  const writeOperation = (parent, api, path, method, operation) => {
    const holder = make("details", parent);
    holder.id = operation.operationId;
    const summary = make("summary", holder);
    make("b", summary, method.toUpperCase());
    make("code", summary, path);
    tell("span", summary, operation.summary, "soft");
    const inside = make("div", holder);
    if (operation.description) tell("p", inside, operation.description);
    const schemes = operation.security || [];
    if (schemes.length) {
      make("p", inside, "Needs a key: Authorization: Bearer KEY, or x-api-key: KEY.");
    }
    if ((operation.parameters || []).length) {
      make("h4", inside, "Parameters");
      fieldTable(inside, operation.parameters.map((each) => ({
        name: each.name, schema: each.schema, isNeeded: each.required, text: each.description,
      })));
    }
    for (const { schema } of Object.values(operation.requestBody ? operation.requestBody.content : {})) {
      make("h4", inside, "Body");
      writeSchema(inside, schema.$ref ? api.components.schemas[nameOf(schema.$ref)] : schema);
    }
    for (const [media, { schema }] of Object.entries(operation.responses["200"].content)) {
      make("h4", inside, "Answer, " + media);
      writeSchema(inside, schema);
    }
    make("h4", inside, "Other statuses");
    const table = make("table", inside);
    for (const [status, response] of Object.entries(operation.responses)) {
      if (status === "200") continue;
      const row = make("tr", table);
      make("th", row, status);
      const known = response.$ref ? api.components.responses[nameOf(response.$ref)] : response;
      tell("td", row, known.description, "soft");
    }
  };

  // A link from elsewhere on the page opens what it leads to.
  const open = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    target.open = true;
    target.scrollIntoView();
  };

  const show = (api) => {
    const info = make("p", page, "Version " + api.info.version + ". The same for machines: ", "soft");
    make("a", info, "openapi.json").href = "openapi.json";
    make("h2", page, "Routes");
    for (const [path, operations] of Object.entries(api.paths)) {
      for (const method of METHODS) {
        if (operations[method]) writeOperation(page, api, path, method, operations[method]);
      }
    }
    make("h2", page, "Schemas");
    for (const [name, schema] of Object.entries(api.components.schemas)) {
      const holder = make("details", page);
      holder.id = "schema-" + name;
      make("code", make("summary", holder), name);
      const inside = make("div", holder);
      if (schema.description) tell("p", inside, schema.description);
      writeSchema(inside, schema);
    }
    addEventListener("hashchange", open);
    open();
  };

  fetch("openapi.json")
    .then((answer) => (answer.ok ? answer.json() : Promise.reject(new Error("status " + answer.status))))
    .then(show)
    .catch((error) => make("p", page, "openapi.json could not be shown: " + error.message));
})();
