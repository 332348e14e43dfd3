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

{{- /* The namespaces that are served, as a list in JSON; an empty name is all of them. */}}
{{- define "remoe.scopes" -}}
{{- $scopes := concat (.Values.watchNamespaces | default list) (list .Values.watchNamespace | compact) | uniq }}
{{- default (list "") $scopes | toJson }}
{{- end }}

{{- /* Who the pods run as. Where the cluster chooses the user, as OpenShift does, none is named. */}}
{{- define "remoe.user" -}}
runAsNonRoot: true
{{- if not .Values.arbitraryUser }}
runAsUser: 65532
runAsGroup: 65532
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

{{- /* What the operator gives pods of functions in addition, in JSON; nothing where that is nothing. Kubelets replace $(NAME) in
arguments, but for $$(NAME). */}}
{{- define "remoe.pods" -}}
{{- $functions := .Values.functions | default dict }}
{{- $pods := dict }}
{{- range $key, $value := dict "imagePullSecrets" $functions.imagePullSecrets "labels" $functions.podLabels "annotations" $functions.podAnnotations "env" $functions.extraEnv "arbitraryUser" .Values.arbitraryUser }}
{{- if $value }}
{{- $_ := set $pods $key $value }}
{{- end }}
{{- end }}
{{- if $pods }}
{{- toJson $pods | replace "$" "$$" }}
{{- end }}
{{- end }}

{{- define "remoe.gateway" -}}
{{- printf "%s-gateway" (include "remoe.fullname" .) | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* The Secret of the gateways' certificate: each signer has one of its own. The operator knows the release by its name. */}}
{{- define "remoe.gatewayIdentity" -}}
{{- printf "%s-gateway-%s" .Release.Name (eq .Values.identity.signer "operator" | ternary "identity" "certificate") }}
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
{{- if $image.digest }}
{{- printf "%s@%s" $image.repository $image.digest }}
{{- else }}
{{- printf "%s:%s" $image.repository (default $root.Chart.AppVersion $image.tag) }}
{{- end }}
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
