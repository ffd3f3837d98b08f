"use strict";

// What Python put in: see _trace in page.py for its shape.
const data = JSON.parse(document.getElementById("data").textContent);
const words = (text) => (text ? text.split(" ") : []);
for (const trace of data.traces) {
  for (const rank of trace.ranks) Object.assign(rank, { actions: words(rank.actions), waits: words(rank.waits) });
}

// One action by its name in pipelab's notation: stage, kind, micro-batch (an all-reduce has none).
function decode(trace, name) {
  const [, stage, letter, microbatch] = /^(\d+)(\D)(\d*)$/.exec(name);
  return { name, letter, stage, microbatch: microbatch ? Number(microbatch) : null, label: trace.namesStages ? name : letter + microbatch };
}

// The first index whose value is above `bound`, in a list that rises.
function above(values, bound) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > bound) high = middle; else low = middle + 1;
  }
  return low;
}

// Whole numbers in full, others to seven digits: as many as the data have.
function number(value) {
  return Number(value.toPrecision(7)).toLocaleString("en-US", { maximumFractionDigits: 12 });
}

// A time with its unit; "units" is what abstract times are called.
function time(value, unit) {
  const text = number(value);
  return `${text} ${unit === "units" && text === "1" ? "unit" : unit}`;
}
