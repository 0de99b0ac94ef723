// Calls the server from Node: npm install @grpc/grpc-js @grpc/proto-loader, then
//   node client.js HOST:PORT QUESTION [IMAGE]
// Checks the server's health, asks the question once complete and once as a stream, cancels a further stream in the middle,
// and makes a call that the server rejects.
const fs = require("fs");
const path = require("path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, question, image] = process.argv.slice(2);
if (!question) {
  console.error("usage: node client.js HOST:PORT QUESTION [IMAGE]");
  process.exit(2);
}
const protos = path.join(__dirname, "..", "..", "protos");
const definition = loader.loadSync("saccade/v1/inference.proto", { includeDirs: [protos], keepCase: true, longs: String, enums: String });
const { saccade } = grpc.loadPackageDefinition(definition);

const credentials = grpc.credentials.createInsecure();
const client = new saccade.v1.InferenceService(address, credentials, { "grpc.max_send_message_length": -1 });
const request = {
  prompt: { text: question, images: image ? [{ data: fs.readFileSync(image) }] : [] },
  sampling: { max_tokens: 12, temperature: 0, ignore_eos: true },
};
const deadline = () => ({ deadline: Date.now() + 60000 });

// grpc.health.v1: an empty request is about the whole server; the response has one field, which is 1 for SERVING.
const Health = grpc.makeGenericClientConstructor({
  check: {
    path: "/grpc.health.v1.Health/Check", requestStream: false, responseStream: false,
    requestSerialize: (message) => message, responseDeserialize: (data) => data,
  },
});

const health = () =>
  new Promise((resolve, reject) =>
    new Health(address, credentials).check(Buffer.alloc(0), deadline(), (error, data) => (error ? reject(error) : resolve(data[1] === 1))),
  );

const generate = () =>
  new Promise((resolve, reject) => client.Generate(request, deadline(), (error, response) => (error ? reject(error) : resolve(response))));

const stream = () =>
  new Promise((resolve, reject) => {
    let text = "";
    const call = client.StreamGenerate({ request }, deadline());
    call.on("data", (event) => (text += event.delta ? event.delta.text : ""));
    call.on("error", reject);
    call.on("end", () => resolve(text));
  });

const stopped = () =>
  new Promise((resolve) => {
    const endless = { ...request, sampling: { temperature: 0, ignore_eos: true } };
    const call = client.StreamGenerate({ request: endless }, deadline());
    call.on("data", (event) => event.delta && call.cancel());
    call.on("error", (error) => resolve(error.code === grpc.status.CANCELLED));
  });

const refused = () =>
  new Promise((resolve) => client.Generate({ ...request, model: "no such model" }, deadline(), (error) => resolve(error && error.code)));

(async () => {
  const whole = await generate();
  const streamed = await stream();
  console.log(
    JSON.stringify({
      serving: await health(), text: whole.samples[0].text, same: streamed === whole.samples[0].text,
      tokens: whole.samples[0].usage.completion_tokens, cancelled: await stopped(), refused: await refused(),
    }),
  );
  process.exit(0);
})().catch((error) => {
  console.error(error);
  process.exit(1);
});
