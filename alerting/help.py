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
