// Command manifests validates Kubernetes manifests from its standard input with an API server's own
// code: strict decoding, defaults, validation, and the Pod Security Standard that a pod's namespace
// enforces.
package main

import (
	"bufio"
	"fmt"
	"io"
	"os"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/apps"
	_ "k8s.io/kubernetes/pkg/apis/apps/install"
	appsvalidation "k8s.io/kubernetes/pkg/apis/apps/validation"
	"k8s.io/kubernetes/pkg/apis/core"
	_ "k8s.io/kubernetes/pkg/apis/core/install"
	corevalidation "k8s.io/kubernetes/pkg/apis/core/validation"
	"k8s.io/kubernetes/pkg/apis/networking"
	_ "k8s.io/kubernetes/pkg/apis/networking/install"
	networkvalidation "k8s.io/kubernetes/pkg/apis/networking/validation"
	"k8s.io/kubernetes/pkg/apis/policy"
	_ "k8s.io/kubernetes/pkg/apis/policy/install"
	policyvalidation "k8s.io/kubernetes/pkg/apis/policy/validation"
	"k8s.io/kubernetes/pkg/apis/rbac"
	_ "k8s.io/kubernetes/pkg/apis/rbac/install"
	rbacvalidation "k8s.io/kubernetes/pkg/apis/rbac/validation"
	"k8s.io/pod-security-admission/api"
	security "k8s.io/pod-security-admission/policy"
)

func validate(object runtime.Object) (field.ErrorList, error) {
	switch known := object.(type) {
	case *core.Namespace:
		return corevalidation.ValidateNamespace(known), nil
	case *core.ConfigMap:
		return corevalidation.ValidateConfigMap(known), nil
	case *core.ServiceAccount:
		return corevalidation.ValidateServiceAccount(known), nil
	case *core.Service:
		return corevalidation.ValidateServiceCreate(known), nil
	case *apps.DaemonSet:
		return appsvalidation.ValidateDaemonSet(known, corevalidation.PodValidationOptions{}), nil
	case *apps.Deployment:
		return appsvalidation.ValidateDeployment(known, corevalidation.PodValidationOptions{}), nil
	case *networking.NetworkPolicy:
		return networkvalidation.ValidateNetworkPolicy(known, networkvalidation.NetworkPolicyValidationOptions{}), nil
	case *policy.PodDisruptionBudget:
		return policyvalidation.ValidatePodDisruptionBudget(known, policyvalidation.PodDisruptionBudgetValidationOptions{}), nil
	case *rbac.ClusterRole:
		return rbacvalidation.ValidateClusterRole(known, rbacvalidation.ClusterRoleValidationOptions{}), nil
	case *rbac.ClusterRoleBinding:
		return rbacvalidation.ValidateClusterRoleBinding(known), nil
	}
	return nil, fmt.Errorf("no validation for %T", object)
}

// checkSecurity evaluates a workload's pods at the level of their namespace, which precedes them.
func checkSecurity(object runtime.Object, levels map[string]api.Level) error {
	var template corev1.PodTemplateSpec
	var namespace string
	switch known := object.(type) {
	case *corev1.Namespace:
		levels[known.Name] = api.Level(known.Labels[api.EnforceLevelLabel])
		return nil
	case *appsv1.DaemonSet:
		template, namespace = known.Spec.Template, known.Namespace
	case *appsv1.Deployment:
		template, namespace = known.Spec.Template, known.Namespace
	default:
		return nil
	}
	evaluator, err := security.NewEvaluator(security.DefaultChecks(), nil)
	if err != nil {
		return err
	}
	level := api.LevelVersion{Level: levels[namespace], Version: api.LatestVersion()}
	if !level.Valid() {
		return fmt.Errorf("namespace %s enforces no level", namespace)
	}
	found := security.AggregateCheckResults(
		evaluator.EvaluatePod(level, &template.ObjectMeta, &template.Spec))
	if !found.Allowed {
		return fmt.Errorf("%s forbids: %s", level, found.ForbiddenDetail())
	}
	return nil
}

func check(document []byte, levels map[string]api.Level) (string, error) {
	scheme := legacyscheme.Scheme
	strict := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme, scheme,
		json.SerializerOptions{Yaml: true, Strict: true})
	sent, kind, err := strict.Decode(document, nil, nil)
	if err != nil {
		return "?", err
	}
	scheme.Default(sent)
	object, err := scheme.UnsafeConvertToVersion(sent.DeepCopyObject(), runtime.InternalGroupVersioner)
	if err != nil {
		return kind.Kind, err
	}
	found, err := validate(object)
	if err != nil {
		return kind.Kind, err
	}
	if len(found) > 0 {
		return kind.Kind, found.ToAggregate()
	}
	return kind.Kind, checkSecurity(sent, levels)
}

func main() {
	reader := yaml.NewYAMLReader(bufio.NewReader(os.Stdin))
	levels := map[string]api.Level{}
	status := 0
	for {
		document, err := reader.Read()
		if err == io.EOF {
			os.Exit(status)
		}
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		kind, err := check(document, levels)
		if err != nil {
			status = 1
			fmt.Println(kind, err)
		} else {
			fmt.Println(kind, "valid")
		}
	}
}
