{{- define "remoe.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 53 | trimSuffix "-" }}
{{- end }}

{{- /* Names of the release's objects. The name of the release itself if it contains "remoe" already. */}}
{{- define "remoe.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 53 | trimSuffix "-" }}
{{- else if contains (include "remoe.name" .) .Release.Name }}
{{- .Release.Name | trunc 53 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "remoe.name" .) | trunc 53 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- /* Names of cluster-wide roles: releases in other namespaces may have the same name. */}}
{{- define "remoe.farName" -}}
{{- printf "%s:%s" .Release.Namespace (include "remoe.fullname" .) }}
{{- end }}

{{- define "remoe.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "remoe.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "missing serviceAccount.name: required with serviceAccount.create false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- /* Served namespaces as a list in JSON. An empty name stands for all namespaces. */}}
{{- define "remoe.scopes" -}}
{{- $scopes := concat (.Values.watchNamespaces | default list) (list .Values.watchNamespace | compact) | uniq }}
{{- default (list "") $scopes | toJson }}
{{- end }}

{{- /* Namespaces in which functions can run, as a list in JSON: those whose deployments get certificates. An empty name stands for
all namespaces. */}}
{{- define "remoe.functionScopes" -}}
{{- $scopes := include "remoe.scopes" . | fromJsonArray }}
{{- if and (include "remoe.signer" .) (not (compact $scopes)) (not .Values.identity.allNamespaces) }}
{{- $scopes = .Values.identity.namespaces | default list }}
{{- end }}
{{- toJson $scopes }}
{{- end }}

{{- /* User of the pods. If the cluster chooses it, as OpenShift does, none is set. */}}
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

{{- /* Additions to the pods of functions in JSON, or nothing. Kubelets replace $(NAME) in arguments, but not
$$(NAME). */}}
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

{{- /* Rules of --allow-source. Empty: any host with a public address. */}}
{{- define "remoe.sources" -}}
{{- $sources := .Values.sources | default dict }}
{{- $rules := concat ($sources.allowed | default list) ($sources.allowedRanges | default list) }}
{{- range $sources.refusedRanges }}
{{- $rules = append $rules (printf "!%s" .) }}
{{- end }}
{{- join "," $rules }}
{{- end }}

{{- define "remoe.gateway" -}}
{{- printf "%s-gateway" (include "remoe.fullname" .) | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* Signer of certificates. Empty for `none` and its alias (values.schema.json). */}}
{{- define "remoe.signer" -}}
{{- if has .Values.identity.signer (list "operator" "cert-manager") }}{{ .Values.identity.signer }}{{ end -}}
{{- end }}

{{- /* Secret of the gateways' certificate, one for each signer. The operator derives it from the release's name. */}}
{{- define "remoe.gatewayIdentity" -}}
{{- printf "%s-gateway-%s" .Release.Name (eq .Values.identity.signer "operator" | ternary "identity" "certificate") }}
{{- end }}

{{- /* Arguments of the release's gateways that run, in JSON. An upgrade keeps what values leave open as the release has it. */}}
{{- define "remoe.gatewayArguments" -}}
{{- $arguments := list }}
{{- if .Release.IsUpgrade }}
{{- $live := lookup "apps/v1" "Deployment" .Release.Namespace (include "remoe.gateway" .) | default dict }}
{{- range (dig "spec" "template" "spec" "containers" list $live) }}
{{- if eq .name "gateway" }}
{{- $arguments = .args | default list }}
{{- end }}
{{- end }}
{{- end }}
{{- toJson $arguments }}
{{- end }}

{{- /* "yes" if gateways take requests without keys: by gateway.open, or because those that run do. */}}
{{- define "remoe.gatewayOpen" -}}
{{- $gateway := .Values.gateway }}
{{- if $gateway.keysSecretName }}
{{- if $gateway.open }}
{{- fail "gateway.open and gateway.keysSecretName exclude each other: remove one" }}
{{- end }}
{{- else if kindIs "bool" $gateway.open }}
{{- $gateway.open | ternary "yes" "" }}
{{- else }}
{{- $live := include "remoe.gatewayArguments" . | fromJsonArray }}
{{- if and $live (not (regexMatch "(^| )--keys=" (join " " $live))) }}yes{{ end }}
{{- end }}
{{- end }}

{{- /* "yes" if any namespace can take a short name, as in releases before they were scoped. */}}
{{- define "remoe.anyShortName" -}}
{{- $gateway := .Values.gateway }}
{{- if kindIs "bool" $gateway.scopedNames }}
{{- $gateway.scopedNames | ternary "" "yes" }}
{{- else }}
{{- $live := include "remoe.gatewayArguments" . | fromJsonArray }}
{{- if and $live (not (has "--short-names=scoped" $live)) }}yes{{ end }}
{{- end }}
{{- end }}

{{- /* "yes" if that matters: a release that serves one namespace has one owner of names. */}}
{{- define "remoe.namesCanBeTaken" -}}
{{- if and (include "remoe.anyShortName" .) (ne (len (include "remoe.scopes" . | fromJsonArray | compact)) 1) }}yes{{ end }}
{{- end }}

{{- /* "yes" if a NetworkPolicy stands before the gateways. */}}
{{- define "remoe.gatewayPolicy" -}}
{{- $policy := .Values.gateway.networkPolicy | default dict }}
{{- if kindIs "bool" $policy.enabled }}
{{- $policy.enabled | ternary "yes" "" }}
{{- else }}
{{- $live := include "remoe.gatewayArguments" . | fromJsonArray }}
{{- if or (not $live) (lookup "networking.k8s.io/v1" "NetworkPolicy" .Release.Namespace (include "remoe.gateway" .)) }}yes{{ end }}
{{- end }}
{{- end }}

{{- /* Secret with the keys file of the gateways. Empty for open ones. */}}
{{- define "remoe.gatewayKeys" -}}
{{- if not (include "remoe.gatewayOpen" .) }}
{{- .Values.gateway.keysSecretName | default (printf "%s-keys" (include "remoe.gateway" .) | trunc 63 | trimSuffix "-") }}
{{- end }}
{{- end }}

{{- define "remoe.gatewaySelector" -}}
app.kubernetes.io/name: {{ include "remoe.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: gateway
{{- end }}

{{- /* Leases of gateways: those that run, one more in a rollout, and those of the last rollouts that still drain. */}}
{{- define "remoe.leaseSlots" -}}
{{- add 4 (mul 3 (int .Values.gateway.replicas)) }}
{{- end }}

{{- /* Leases of running gateways of versions that named them after their pods, as a list in JSON. */}}
{{- define "remoe.earlierLeases" -}}
{{- $names := list }}
{{- if .Release.IsUpgrade }}
{{- $pods := printf "%s-" (include "remoe.gateway" .) }}
{{- range (lookup "coordination.k8s.io/v1" "Lease" .Release.Namespace "").items }}
{{- $labels := .metadata.labels | default dict }}
{{- $isOurs := and (eq (index $labels "app.kubernetes.io/component" | default "") "gateway") (eq (index $labels "app.kubernetes.io/instance" | default "") $.Release.Name) }}
{{- if and $isOurs (hasPrefix $pods .metadata.name) (not (regexMatch "^[0-9]+$" (trimPrefix $pods .metadata.name))) }}
{{- $names = append $names .metadata.name }}
{{- end }}
{{- end }}
{{- end }}
{{- toJson $names }}
{{- end }}

{{- /* Metrics of gateways and the operator, as a regular expression. */}}
{{- define "remoe.platformMetrics" -}}
remoe_(?:gateway|cost|budget|ledger|operator|prediction|price)_[a-z0-9_]+
{{- end }}

{{- /* Rules whose metrics of gateways and the operator are those of the release's namespace. */}}
{{- define "remoe.rules" -}}
{{- $metric := printf "\\b(%s)" (include "remoe.platformMetrics" .) }}
{{- $selector := printf "namespace=%q" .Release.Namespace }}
{{- $rules := .Files.Get "files/rules/remoe.yaml" }}
{{- $rules = regexReplaceAll (printf "%s\\{" $metric) $rules (printf "${1}{%s," $selector) }}
{{- regexReplaceAll (printf "%s([^a-z0-9_{])" $metric) $rules (printf "${1}{%s}${2}" $selector) }}
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

{{- /* "yes" if the host of a collector tells where it is: an address, NAME, NAME.NAMESPACE or NAME.NAMESPACE.svc... */}}
{{- define "remoe.tracingIsNear" -}}
{{- $host := regexReplaceAll "^https?://(\\[[^\\]]*\\]|[^:/]*).*$" . "${1}" | trimSuffix "." -}}
{{- if regexMatch "^(\\[.*\\]|[0-9]+(\\.[0-9]+){3}|[^.]+(\\.[^.]+(\\.svc(\\..*)?)?)?)$" $host }}yes{{ end -}}
{{- end }}

{{- /* 0 is a ratio, not a missing value. */}}
{{- define "remoe.tracingRatio" -}}
{{- $ratio := (.Values.tracing | default dict).ratio -}}
{{- if kindIs "invalid" $ratio }}0.05{{ else }}{{ $ratio }}{{ end -}}
{{- end }}
