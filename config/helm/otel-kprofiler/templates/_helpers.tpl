{{- define "otel-kprofiler.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{- define "otel-kprofiler.fullname" -}}
{{- $name := include "otel-kprofiler.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "otel-kprofiler.selectorLabels" -}}
app.kubernetes.io/name: {{ include "otel-kprofiler.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "otel-kprofiler.labels" -}}
{{ include "otel-kprofiler.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "otel-kprofiler.serviceAccountName" -}}
{{- $created := ternary (include "otel-kprofiler.fullname" .) "default" .Values.serviceAccount.create -}}
{{- default $created .Values.serviceAccount.name -}}
{{- end }}

{{- /* The agent's health endpoint has the port; without an endpoint there is nothing to probe. */ -}}
{{- define "otel-kprofiler.healthPort" -}}
{{- $health := .Values.config.service.health | default dict -}}
{{- $health.endpoint | default "" | regexFind "[0-9]+$" -}}
{{- end }}
