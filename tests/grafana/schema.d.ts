/**
 * What a dashboard of ours may hold, made of Grafana's own types (npm's @grafana/schema).
 *
 * Grafana's `Panel` leaves `options` and `fieldConfig.custom` open; here each kind of panel has its
 * own. Enums become the texts that stand in JSON, so that literals can be compared with them.
 */
import type * as schema from "@grafana/schema";
import type * as raw from "@grafana/schema/dist/esm/raw/dashboard/x/dashboard_types.gen.js";
import type * as heatmap from "@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen.js";
import type * as stat from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen.js";
import type * as statetimeline from "@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen.js";
import type * as table from "@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen.js";
import type * as timeseries from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen.js";
import type * as xychart from "@grafana/schema/dist/esm/raw/composable/xychart/panelcfg/x/XYChartPanelCfg_types.gen.js";

type Plain<T> = unknown extends T
  ? T
  : T extends string
    ? `${T}`
    : T extends number | boolean | null | undefined
      ? T
      : T extends Array<infer Each>
        ? Array<Plain<Each>>
        : { [Key in keyof T]: Plain<T[Key]> };

/** Prometheus' own part of a query is in no npm package of Grafana; these are the words that we use. */
interface Query extends schema.DataQuery {
  expr: string;
  legendFormat?: string;
  instant?: boolean;
  range?: boolean;
  format?: "time_series" | "table" | "heatmap";
}

type Property<Custom> =
  | { [Key in Extract<keyof Custom, string>]: { id: `custom.${Key}`; value: Custom[Key] } }[Extract<
      keyof Custom,
      string
    >]
  | { [Key in Exclude<keyof raw.FieldConfig, "custom">]: { id: Key; value: raw.FieldConfig[Key] } }[Exclude<
      keyof raw.FieldConfig,
      "custom"
    >];

interface Kind<Type extends string, Options, Custom>
  extends Omit<raw.Panel, "type" | "options" | "fieldConfig" | "targets"> {
  type: Type;
  options: Options;
  targets: Query[];
  fieldConfig: {
    defaults: Omit<raw.FieldConfig, "custom"> & { custom?: Custom };
    overrides: Array<{ matcher: raw.MatcherConfig; properties: Array<Property<Required<Custom>>> }>;
  };
}

type Panel =
  | Kind<"heatmap", heatmap.Options, heatmap.FieldConfig>
  | Kind<"stat", stat.Options, Record<string, never>>
  | Kind<"state-timeline", statetimeline.Options, statetimeline.FieldConfig>
  | Kind<"table", table.Options, table.FieldConfig>
  | Kind<"timeseries", timeseries.Options, timeseries.FieldConfig>
  | Kind<"xychart", xychart.Options, xychart.FieldConfig>;

interface Row extends Omit<raw.RowPanel, "panels"> {
  panels: Panel[];
}

/** Likewise Prometheus' words for an annotation. */
interface Annotation extends Omit<schema.AnnotationQuery<Query>, "snapshotData"> {
  titleFormat: string;
  textFormat: string;
}

interface Whole extends Omit<raw.Dashboard, "panels" | "annotations"> {
  panels: Array<Panel | Row>;
  annotations: { list: Annotation[] };
}

export type Dashboard = Plain<Whole>;
