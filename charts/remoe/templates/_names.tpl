{{- define "remoe.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 53 | trimSuffix "-" }}
{{- end }}

{{- /* Names of the release's objects; the release's own name where it says "remoe" already. */}}
{{- define "remoe.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 53 | trimSuffix "-" }}
{{- else if contains (include "remoe.name" .) .Release.Name }}
{{- .Release.Name | trunc 53 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "remoe.name" .) | trunc 53 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- /* Names of roles that reach beyond the release's namespace: releases of the same name stand in others. */}}
{{- define "remoe.farName" -}}
{{- printf "%s:%s" .Release.Namespace (include "remoe.fullname" .) }}
{{- end }}

{{- define "remoe.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "remoe.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is needed when serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "remoe.selector" -}}
app.kubernetes.io/name: {{ include "remoe.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "remoe.labels" -}}
{{ include "remoe.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: remoe
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "remoe.gateway" -}}
{{- printf "%s-gateway" (include "remoe.fullname" .) | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "remoe.gatewaySelector" -}}
app.kubernetes.io/name: {{ include "remoe.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: gateway
{{- end }}

{{- define "remoe.gatewayLabels" -}}
{{ include "remoe.gatewaySelector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: remoe
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* One of .Values.images as a reference: (list $ .Values.images.main) */}}
{{- define "remoe.image" -}}
{{- $root := index . 0 }}
{{- $image := index . 1 }}
{{- printf "%s:%s" $image.repository (default $root.Chart.AppVersion $image.tag) }}
{{- end }}

{{- /* Whether the name of a collector tells where it is: an address, NAME, NAME.NAMESPACE or NAME.NAMESPACE.svc and more. */}}
{{- define "remoe.tracingIsNear" -}}
{{- $host := regexReplaceAll "^https?://(\\[[^\\]]*\\]|[^:/]*).*$" . "${1}" | trimSuffix "." -}}
{{- if regexMatch "^(\\[.*\\]|[0-9]+(\\.[0-9]+){3}|[^.]+(\\.[^.]+(\\.svc(\\..*)?)?)?)$" $host }}yes{{ end -}}
{{- end }}

{{- /* 0 is a ratio, and not one that is missing. */}}
{{- define "remoe.tracingRatio" -}}
{{- $ratio := (.Values.tracing | default dict).ratio -}}
{{- if kindIs "invalid" $ratio }}0.05{{ else }}{{ $ratio }}{{ end -}}
{{- end }}
