"""What `act-alerting COMMAND --help` says: what it does, and an example that can be pasted."""

SERVE_HELP = """Receive Alertmanager's notifications and ask the trainers for backups and rollbacks.

Alertmanager posts to http://ADDRESS/alerts with the token of the token file. Each notification is
recorded in the database first; then the run that it names is looked up among the folders in the
runs folder, and a request is put into its control directory, where the trainer's guard finds it.

Example:

```
(umask 077; openssl rand -hex 32 > receiver-token)
act-alerting serve --runs runs --database db.sqlite \\
    --token-file receiver-token
```

The config file holds the same keys and more, each with its reason: see alerting/receiver.yml.
What is given here wins over the file. ACT_LOG_LEVEL is DEBUG, INFO (default), WARNING or ERROR."""

SEND_TEST_HELP = """Send one test message to each target of `notify:`, and print what came back.

Exit code 0 only if all of them took it.

Example:

```
(umask 077; printf %s 'https://open.feishu.cn/...' > feishu-url)
act-alerting send-test --config receiver.yml --only oncall
```"""

INIT_HELP = """Write a config with a reason beside each key, and a file with a random token.

With --bot the config has an entry for that bot, and there are empty files for its address and its
secret, which only you can read. Nothing that exists is overwritten.

Example:

```
act-alerting init --bot feishu --language zh
```"""


STATUS_HELP = """Print a row a run: its guard's words, open request, last decision and answer.

Messages are counted by run: still to be sent, and given up within a day. The receiver need not run
for this, and no secret is read. Where the output is no terminal, columns are separated by tabs.

Example:

```
act-alerting status --config receiver.yml
```

The receiver answers the same as JSON at GET /runs/NAME, with the token."""


MODE_HELP = """Switch whether trainers are asked for anything, while the receiver runs; or print it.

In notify-only nobody is asked, and people are told what would have been asked. What is switched to
is kept in the database and wins over `mode:` of the config, also after a restart.

Example:

```
act-alerting mode notify-only --config receiver.yml
```"""


CHECK_HELP = """Say to whom an alertmanager.yml brings each shipped alert, and whom `notify:` lists.

amtool checks the file and answers for the routes. Exit code 1 where an alert reaches nobody, those
of severity info aside, which are only shown.

Example:

```
act-alerting check alertmanager.yml --config receiver.yml
```"""


DRILL_HELP = """Send a synthetic alert through your Alertmanager, and say which hops work.

The alert ActDrill asks for a recovery like a real one. On its way it is looked for at Alertmanager,
at the receiver and at the run's guard, which says between two steps what it would do, and does
nothing. People get one message that says it is a drill; with --no-people they get none. In the end
the alert is ended. While it lasts a real alert of the same run may come up to 10 s later.

Run it where the receiver runs, as its user. With a pair of Alertmanagers, once for each.

Example:

```
act-alerting drill --run gpt --config receiver.yml
```

Exit code 0 if each hop is fine, 1 if one is broken, 2 if a setting is wrong."""


SUPERVISE_HELP = """Run a trainer, and start it again within seconds after a crash or a hang.

With --run-folder, that of the trainer's guard, the supervisor sees from the guard's heartbeat
whether steps end, and from its status whether the run has halted or finished. Restarts are counted
in that folder until the run gets further than ever before. Without it only crashes are noticed.

Example:

```
act-alerting supervise --run-folder runs/gpt -- \\
    torchrun --standalone --nproc-per-node=8 train.py
```

Exit codes: 0 finished; 2 a setting is wrong; 69 given up, as restarts brought no progress; 75 ended
by SIGTERM, SIGINT or SIGHUP before the end: start it again; 78 halted by the guard: people must
look. docs/supervise.md has them for systemd, Slurm and Kubernetes."""


CHECKPOINTS_HELP = """Look at a run's checkpoints, say which are to be trusted, and keep some.

Works while the trainer runs and when it is dead. `list`, `verify` and `plan` change nothing.

- confirmed: training went on from it for a clean stretch
- pending: nothing bad is known, and not enough steps have passed
- suspect: saved when the run was bad already, or a person said so; never gone on from
- corrupt: a file is missing or altered, or it could not be loaded

Example:

```
act-alerting checkpoints list runs/gpt
```"""

LIST_HELP = """Print a row a checkpoint, the newest first, and which one the next start takes.

"on line" are those that the present training descends from; a rollback leaves others behind, which
are not gone on from. Files are not read: see `verify`. Where the output is no terminal, columns are
separated by tabs.

Example:

```
act-alerting checkpoints list runs/gpt
act-alerting checkpoints list runs/gpt --json | jq .next_start
```"""

VERIFY_HELP = """Compare files with the sizes and SHA-256 hashes of the manifest.

Exit code 1 where one differs, and it says which file and how. No verdict is changed: the guard
verifies what it loads, and takes an older checkpoint instead.

Example:

```
act-alerting checkpoints verify runs/gpt --all
```"""

MARK_HELP = """Give your verdict on a checkpoint: suspect is never gone on from, confirmed is.

It is recorded as the operator's, with your reason, over what the guard has said so far. What the
guard finds later counts too, and the worse of the two holds. A corrupt checkpoint is verified
first, and stays corrupt if its files are not whole.

Example:

```
act-alerting checkpoints mark runs/gpt step-00004500-g0 suspect \\
    --reason "trained on shard 17"
```"""

PIN_HELP = """Keep a checkpoint: no pinned one is ever deleted, and it takes no place among `keep`.

Exit code 0 means that it stays, also where the guard was about to delete it.

Example:

```
act-alerting checkpoints pin runs/gpt step-00004500-g0 --reason "for the paper"
```"""

UNPIN_HELP = """Let a checkpoint go: the guard may delete it when it next publishes one.

Example:

```
act-alerting checkpoints unpin runs/gpt step-00004500-g0
```"""

PLAN_HELP = """Say where a rollback would go to, and why not to each newer checkpoint.

The choice is the guard's own. Nothing is changed and nobody is asked, with or without --dry-run.
The run folder does not tell the margin: give the trainer's `onset_margin_steps` where it is not 10.
Exit code 1 where there is no checkpoint to roll back to.

Example:

```
act-alerting checkpoints plan runs/gpt --onset 4700 --dry-run
```"""
