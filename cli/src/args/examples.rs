//! Examples in the help of each command.

pub(super) const INSPECT: &str = "Examples:
  remoe inspect --model ./model
  remoe inspect --model hf://org/name --json";

pub(super) const LOGITS: &str = "Examples:
  remoe logits --model ./model --prompt-ids 1,2,3 --json
  remoe logits --model ./model --prompt 'Once upon' --dtype float32 --remote-ratio 0.25";

pub(super) const GENERATE: &str = "Examples:
  remoe generate --model ./model --prompt 'Once upon a time' --max-tokens 64
  remoe generate --model ./model --chat --prompt 'What is a lake?' --temperature 0.7 --seed 3
  remoe generate --model ./model --prompt-ids 1,2,3 --remote-ratio 0.5 --replicas 2 --json";

pub(super) const RUN: &str = "Examples:
  remoe run ./model
  remoe run ./model 'What is a lake?' --remote-ratio 0.5
  printf 'What is a lake?\\nAnd a pond?\\n' | remoe run ./model
  remoe run ./model 'Summarise this text.' < lake.txt

In the terminal: /help lists the commands and settings, Ctrl-C ends an answer, Ctrl-D the
conversation. Text between \"\"\" and \"\"\" may span lines; a backslash at the end of a line
continues it.";

pub(super) const PULL: &str = "Examples:
  remoe pull hf://allenai/OLMoE-1B-7B-0125-Instruct
  remoe pull s3://bucket/models/olmoe --model-cache /data/models";

pub(super) const LIST: &str = "Examples:
  remoe list
  remoe list --json";

pub(super) const RM: &str = "Examples:
  remoe rm hf://allenai/OLMoE-1B-7B-0125-Instruct";

pub(super) const PS: &str = "Examples:
  remoe ps
  remoe ps --quiet
  remoe ps --json

States are those of `remoe top`: `active`, `asleep`, `waking` or `draining`; `loading` before a model
answers for the first time, `locked` if its gateway needs a key, `unreachable` if it does not answer.";

pub(super) const STOP: &str = "Examples:
  remoe stop model
  remoe stop 4711
  remoe stop --all

`stop` waits up to 60 s for running requests to end.";

pub(super) const TOP: &str = "Examples:
  remoe top
  remoe top --endpoint http://10.0.0.7:8000 --api-key secret
  remoe top --once
  remoe top --json

Keys: q or Ctrl-C quits, s and the arrow keys choose the column to sort by, r reverses the order.
Rates and times to first token (TTFT) are those of the last 10 s. With --once or --json, or if the
output is not a terminal, `top` measures for a second, prints once and ends.";

pub(super) const COST: &str = "Examples:
  remoe cost ./ledger
  remoe cost ./ledger --reconcile
  remoe cost ./ledger --export csv > requests.csv

Amounts are US dollars (with --json and --export: nano-dollars), at the prices that
`remoe up --pricing` (on a cluster: spec.pricing) had when the functions ran. The report covers the
whole ledger, with a sum for each day in UTC. For another time range, export the requests and
filter them by their time in nanoseconds since 1970: column `unix_ns` of CSV, field `at` of JSON.";

pub(super) const DASHBOARDS: &str = "Examples:
  remoe dashboards ./monitoring
  remoe dashboards ./monitoring --endpoint http://10.0.0.7:8000 --api-key-file key.txt

The command prints how to start Prometheus and Grafana with the folder.";

pub(super) const DOCTOR: &str = "Examples:
  remoe doctor
  remoe doctor ./model
  remoe doctor hf://org/name --json

The exit code is 1 if a check fails.";

pub(super) const MAN: &str = "Examples:
  remoe man ~/.local/share/man/man1";

pub(super) const SCHEMA: &str = "Examples:
  remoe schema
  remoe schema problem > problem.schema.json";

pub(super) const CHECK: &str = "Examples:
  remoe check keys.yaml
  remoe check deployments/*.yaml prices.yaml --json
  remoe check --kind workload workload.yaml

The exit code is 0 if all files can be used, else 2. Of MoEDeployments, fields that only a cluster
uses are checked by name; `kubectl apply --dry-run=server` checks their values.";

pub(super) const COMPLETIONS: &str = "Examples:
  remoe completions bash > ~/.local/share/bash-completion/completions/remoe
  remoe completions zsh > ~/.zfunc/_remoe
  remoe completions fish > ~/.config/fish/completions/remoe.fish

In bash, zsh and fish, `remoe stop` completes the names of running models.";

pub(super) const PROFILE: &str = "Examples:
  remoe profile --model ./model --quick
  remoe profile --model ./model --out profile.json --dtype bfloat16
  remoe profile --model ./model --address 10.0.0.7:50051 --json";

pub(super) const RECORD: &str = "Examples:
  remoe record --model demo/model --prompts prompts.jsonl --out history.npy
  remoe record --model demo/model --prompts chats.jsonl --out history.npy --max-tokens 100 --tokens";

pub(super) const UP: &str = "Examples:
  remoe up --model ./model
  remoe up --model ./model --remote-ratio 0.25 --replicas 2 --port 0 --json
  remoe up --model ./model --remote-ratio 0.5 --groups 3 --replicas 2
  remoe up --model ./model --remote-ratio 0.5 --remote-set history --history history.npy
  remoe up --file deployment.yaml
  remoe up --model ./model --plan plan.json --host 0.0.0.0 --api-key secret
  remoe up ./model --idle 60s --replan 60s --experience ./experience
  remoe up ./model --pricing examples/pricing/aws-fargate.yaml --ledger ./ledger
  remoe up ./model --keys keys.yaml --ledger ./ledger
  remoe up ./small ./large --served-model-name small --served-model-name large --idle 10s";

pub(super) const PLAN: &str = "Examples:
  remoe plan --model ./model --tpot 50ms
  remoe plan ./model --explain
  remoe plan ./model --json > plan.json
  remoe up ./model --plan plan.json
  remoe plan ./model --previous plan.json --json > next.json
  remoe plan hf://deepseek-ai/DeepSeek-V3 --nodes examples/nodes/aws-us-east-1.yaml
  remoe plan ./model --nodes nodes.yaml --manifest > deployment.yaml
  remoe plan --problem problem.json
  remoe plan --problem problem.json --previous plan.json --hysteresis 0.1
  remoe plan --problem problem.json --evaluate plan.json --json
  remoe plan --problem problem.json --preallocate

`plan --json` prints plan files. --previous and --evaluate read them, and so does --plan of up,
run, generate, logits and record. docs/reference/plan-files.md has the fields of plan and problem
files.
tests/fixtures/planning/example-problem.json is an example problem.";

pub(super) const EVAL: &str = "Examples:
  remoe eval --out evaluation
  remoe eval --model ./model --records history.npy --predictor ./model/predictor --json
  remoe eval --model ./model --profile profile.json --pricing prices.yaml
  remoe eval --only regret --problem problem.json --out evaluation

docs/evaluation.md describes the experiments, the Remoe paper and the assumed server.";
