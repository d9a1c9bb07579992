"""What messages to people say, in the languages that they are written in: English and Chinese.

The rules' annotations are English and are used as they are. For Chinese each shipped alert has its
sentence here, with the value that its summary ends in; an alert that is not ours keeps its summary.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)

PHRASES: dict[Language, dict[str, str]] = {
    "en": {
        "run": "run {run}",
        "no_run": "no run",
        "firing": "{firing} firing: {what}",
        "mixed": "{firing} firing, {over} over: {what}",
        "over": "over: {what}",
        "drill": "drill, nothing is wrong: {what}",
        "drill_text": (
            "ActDrill is a drill: somebody tries whether alerts arrive here. There is nothing to "
            "do."
        ),
        "item": "{alertname} ({severity}): {text}",
        "item_over": "over: {alertname} {where}",
        "first_bad": "First bad layer: {layer} ({tensor}), at step {step}",
        "worst": "Worst layers: {worst}",
        "diagnosis": "Diagnosis: {text}",
        "recover": (
            "What is done: the trainer is asked to save an emergency checkpoint and to roll back "
            "to the newest healthy one."
        ),
        "checkpoint": "What is done: the trainer is asked for a backup checkpoint.",
        "nothing": "What is done: nothing automatically.",
        "resolved": "The values are calm again. Whether a rollback did that is told by itself.",
        "left_out": "{count} more alerts are left out.",
        "left_out_one": "1 more alert is left out.",
        "runbook": "Runbook",
        "dashboard": "Dashboard",
        "done_recover": "run {run} was rolled back from step {step} to step {resumed_step}",
        "done_checkpoint": "run {run} made a backup at step {step}",
        "refused_recover": "run {run} refused to roll back at step {step}",
        "refused_checkpoint": "run {run} refused to make a backup at step {step}",
        "failed_recover": "the rollback of run {run} failed at step {step}",
        "failed_checkpoint": "the backup of run {run} failed at step {step}",
        "lost_recover": "run {run} did not answer when asked to roll back",
        "lost_checkpoint": "run {run} did not answer when asked for a backup",
        "lost": "Look whether its trainer still runs: nobody has rolled it back.",
        "resumed_from": "It goes on from checkpoint {resumed_from}.",
        "onset": "First bad step: {onset}",
        "made_recover": "Emergency checkpoint: {checkpoint}",
        "made_checkpoint": "Checkpoint: {checkpoint}",
        "rollbacks_left": "Rollbacks left: {rollbacks_left}",
        "asked_by": "Asked for by {alert}.",
        "detail": "The trainer says: {detail}",
        "problem": "What was seen: {detail}",
        "notify_only": "What is done: nothing, in mode notify-only. Switch: act-alerting mode act",
        "notify_only_recover": "run {run} was not asked to roll back (mode notify-only)",
        "notify_only_checkpoint": "run {run} was not asked for a backup (mode notify-only)",
        "notify_only_text": (
            "In mode act its trainer would have been asked. To switch: act-alerting mode act"
        ),
        "overdue_recover": "run {run} was asked to roll back {minutes} min ago and does not do it",
        "overdue_recover_text": "Nobody has rolled it back; the request is still open.",
        "overdue_checkpoint": (
            "run {run} was asked for a backup {minutes} min ago and does not make it"
        ),
        "overdue_checkpoint_text": "There is no backup; the request is still open.",
        "overdue_text": "Look whether its trainer still makes steps: a guard looks between two.",
        "watchdog_missed": "alerts do not get through: no watchdog for {seconds} s",
        "watchdog_missed_text": (
            "Prometheus, Alertmanager or the way from them to the receiver is down, so other "
            "alerts may reach nobody either. See ActWatchdog in the runbook."
        ),
        "watchdog_back": "alerts get through again: the watchdog is back after {seconds} s",
        "watchdog_back_text": "What fired meanwhile and still does is told by its own message.",
        "unreadable": "An alert came that cannot be shown",
        "test": "Test message of act-exporter",
        "test_text": "Alerts about your trainings arrive here. Nothing is wrong.",
    },
    "zh": {
        "run": "训练任务 {run}",
        "no_run": "未指明训练任务",
        "firing": "{firing} 条告警：{what}",
        "mixed": "{firing} 条告警，{over} 条已解除：{what}",
        "over": "已解除：{what}",
        "drill": "演练，并无故障：{what}",
        "drill_text": "ActDrill 为演练：有人在检查告警能否送达这里，无需处理。",
        "item": "{alertname}（{severity}）：{text}",
        "item_over": "已解除：{alertname} {where}",
        "first_bad": "最先异常的层：{layer}（{tensor}），第 {step} 步",
        "worst": "偏离最大的层：{worst}",
        "diagnosis": "诊断：{text}",
        "recover": "处置：已请求训练进程保存紧急检查点，并回滚到最近的健康检查点。",
        "checkpoint": "处置：已请求训练进程保存备份检查点。",
        "nothing": "处置：不会自动处理。",
        "resolved": "数值已恢复平稳；是否由回滚所致，另有消息说明。",
        "left_out": "另有 {count} 条告警未列出。",
        "left_out_one": "另有 1 条告警未列出。",
        "runbook": "处理手册",
        "dashboard": "仪表盘",
        "done_recover": "训练任务 {run} 已从第 {step} 步回滚到第 {resumed_step} 步",
        "done_checkpoint": "训练任务 {run} 已在第 {step} 步完成备份",
        "refused_recover": "训练任务 {run} 在第 {step} 步拒绝回滚",
        "refused_checkpoint": "训练任务 {run} 在第 {step} 步拒绝备份",
        "failed_recover": "训练任务 {run} 在第 {step} 步回滚失败",
        "failed_checkpoint": "训练任务 {run} 在第 {step} 步备份失败",
        "lost_recover": "训练任务 {run} 未答复回滚请求",
        "lost_checkpoint": "训练任务 {run} 未答复备份请求",
        "lost": "请检查训练进程是否仍在运行：尚未回滚。",
        "resumed_from": "从检查点 {resumed_from} 继续训练。",
        "onset": "最先异常的步：第 {onset} 步",
        "made_recover": "紧急检查点：{checkpoint}",
        "made_checkpoint": "检查点：{checkpoint}",
        "rollbacks_left": "剩余回滚次数：{rollbacks_left}",
        "asked_by": "由告警 {alert} 请求。",
        "detail": "训练进程的说明：{detail}",
        "problem": "观察到的情况：{detail}",
        "notify_only": "处置：仅通知模式，不会自动处理。恢复自动处置：act-alerting mode act",
        "notify_only_recover": "仅通知模式：未请求训练任务 {run} 回滚",
        "notify_only_checkpoint": "仅通知模式：未请求训练任务 {run} 备份",
        "notify_only_text": "在自动处置模式下会向训练进程发出该请求。切换：act-alerting mode act",
        "overdue_recover": "训练任务 {run} 在 {minutes} 分钟前被请求回滚，至今未执行",
        "overdue_recover_text": "尚未回滚；请求仍未处理。",
        "overdue_checkpoint": "训练任务 {run} 在 {minutes} 分钟前被请求备份，至今未执行",
        "overdue_checkpoint_text": "尚无备份；请求仍未处理。",
        "overdue_text": "请检查训练是否仍在推进：训练进程只在两步之间查看请求。",
        "watchdog_missed": "告警通道中断：已有 {seconds} 秒没有收到看门狗告警",
        "watchdog_missed_text": (
            "Prometheus、Alertmanager 或它们到接收器的链路已中断，其他告警也可能无法送达。"
            "请查看处理手册中的 ActWatchdog。"
        ),
        "watchdog_back": "告警通道已恢复：看门狗告警中断 {seconds} 秒后重新到达",
        "watchdog_back_text": "中断期间触发且仍在持续的告警会另行通知。",
        "unreadable": "收到一条无法显示的告警",
        "test": "act-exporter 测试消息",
        "test_text": "训练任务的告警会发到这里。目前一切正常。",
    },
}

SEVERITIES: dict[Language, dict[str, str]] = {
    "en": {},
    "zh": {"critical": "严重", "warning": "警告", "info": "提示"},
}
TENSORS: dict[Language, dict[str, str]] = {"en": {}, "zh": {"input": "输入", "output": "输出"}}

VERDICTS: dict[Language, dict[str, str]] = {
    "en": {
        "activation": (
            "activation fault: layers went bad while the gradients were calm (bad weights, an "
            "unbounded feature map, or the end of the number format)"
        ),
        "gradient": (
            "gradient fault: it exploded while every layer was calm (look at backward, the "
            "learning rate and clipping)"
        ),
        "data": (
            "bad batch: loss and gradient jumped for one batch, the layers hardly; a rollback "
            "would bring it again"
        ),
        "parameters": (
            "broken parameters: an update broke the weights, and the layer named first is no "
            "culprit"
        ),
        "resume": (
            "resume fault: what was loaded is not what was saved, or the code is not the one that "
            "saved it"
        ),
        "loss": (
            "loss fault: layers and gradients are calm (look at the loss function, the labels or "
            "a head)"
        ),
    },
    "zh": {
        "activation": (
            "激活值异常：梯度平稳而层的激活值失控（权重损坏、特征映射无界或数值格式上限）"
        ),
        "gradient": "梯度异常：各层平稳而梯度爆炸（请检查反向传播、学习率与梯度裁剪）",
        "data": "坏数据批次：损失与梯度只在一个批次上突增，各层几乎不变；回滚会再次遇到它",
        "parameters": "参数损坏：某次更新破坏了权重，最先列出的层并非原因",
        "resume": "恢复异常：加载的状态与保存的不一致，或代码已改变",
        "loss": "损失异常：各层与梯度平稳（请检查损失函数、标签或输出头）",
    },
}
"""By the label `verdict` of ActDiagnosis; its rule says the same in its description."""

_STEPS = r"for (\S+) sampled steps"
ALERTS_ZH: dict[str, tuple[str, str]] = {
    "ActLayerAboveBaseline": (r"reached (\S+) times", "达到基线的 {value} 倍"),
    "ActLayerAboveWindow": (r"is (\S+) standard dev", "高于滑动窗口 {value} 个标准差"),
    "ActLayerAboveWindowSustained": (_STEPS, "连续 {value} 个采样步超过 5 个标准差"),
    "ActLayerNonFinite": ("", "出现 NaN 或 Inf"),
    "ActLayerDrift": (r"it is (\S+) times", "持续漂移：已达基线的 {value} 倍且仍在增长"),
    "ActLayerDepthSpike": (r"jumps to (\S+) times", "突增为前面各层的 {value} 倍"),
    "ActLayerHeadroomLow": (r"is at (\S+) of", "已达数值格式上限的 {value}"),
    "ActLayerHeadroomEnding": ("", "将在一小时内达到数值格式上限"),
    "ActLayerDead": (_STEPS, "连续 {value} 个采样步为零或不变"),
    "ActLayerSaturated": (_STEPS, "连续 {value} 个采样步饱和"),
    "ActAttentionLogitsGrowing": (r"reached (\S+) times", "注意力 logits 达到基线的 {value} 倍"),
    "ActLogitsDrifting": (r"is (\S+) from 0", "logits 整体漂移：对数配分函数偏离 0 达 {value}"),
    "ActRankSpread": (r"factor of (\S+) in", "各 rank 相差 {value} 倍"),
    "ActRunaway": (r": (\S+) bad", "正在失控：连续 {value} 个采样步异常"),
    "ActGradientRunaway": (_STEPS, "梯度正在失控：连续 {value} 个采样步超过均值的 20 倍"),
    "ActLossNonFinite": ("", "损失出现 NaN 或 Inf"),
    "ActLossSpike": (r"jumped to (\S+) standard", "损失突增至窗口以上 {value} 个标准差"),
    "ActLossShifted": ("", "损失整体上移且未回落"),
    "ActGradientNonFinite": ("", "梯度出现 NaN 或 Inf"),
    "ActGradientExplosion": (r"reached (\S+) times", "梯度范数达到均值的 {value} 倍"),
    "ActGradientVanishing": ("", "梯度消失"),
    "ActUpdateSpike": (r"was (\S+) times", "权重更新量达到平常的 {value} 倍"),
    "ActUpdatesLost": (r"^(\S+) of", "{value} 的权重未被更新改变（数值格式舍入）"),
    "ActDiagnosis": ("", "见诊断"),
    "ActExporterDown": (r"at (\S+) does", "导出器 {value} 没有响应"),
    "ActTrainerStalled": (r"no step for (.+)$", "已有 {value} 没有完成任何一步"),
    "ActExporterAbsent": ("", "Prometheus 没有任何 act-exporter 采集目标"),
    "ActNodeGone": (r"node of (\S+) for", "节点 {value} 已没有任何数据"),
    "ActHooksSilent": ("", "被监视的层没有运行"),
    "ActExporterErrors": (r'in stage "(.+)"', "导出器在 {value} 阶段出错"),
    "ActOverheadHigh": (r"costs (\S+) of", "监视耗时占训练时间的 {value}"),
    "ActSeriesDropped": ("", "序列数超过上限"),
    "ActJournalDropping": ("", "日志丢失记录"),
    "ActThresholdsDiffer": (r'another "(.+)" than', "训练进程的阈值 {value} 与规则不一致"),
    "ActMemoryNearEnd": (r"uses (\S+) of", "已使用设备显存的 {value}"),
    "ActCheckpointStale": (r"is (.+) old", "最新检查点已有 {value} 之久"),
    "ActCheckpointFailing": ("", "检查点保存失败"),
    "ActRollbackBudgetSpent": ("", "已没有剩余的回滚次数"),
    "ActReceiverDown": (r"at (\S+) does", "接收器 {value} 没有响应"),
    "ActNotificationsFailing": (r'by "(.+)"', "Alertmanager 无法通过 {value} 投递消息"),
    "ActMessagesFailing": (r'to "(.+)"', "接收器无法向 {value} 投递消息"),
    "ActWatchdog": ("", "告警通道正常"),
    "ActDrill": ("", "告警通道演练，并无故障"),
}
"""Alert name to where its summary has the value (a pattern with one group, "" for none), and what
is said in Chinese."""


def summary_in(language: Language, alertname: str, summary: str) -> str | None:
    """What an alert says without its subject, or None where only its English summary says it."""
    if language == "en" or alertname not in ALERTS_ZH:
        return None
    pattern, text = ALERTS_ZH[alertname]
    if not pattern:
        return text
    found = re.search(pattern, summary)
    return text.format(value=found[1]) if found else None
