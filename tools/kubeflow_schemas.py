"""Write tests/parallel/launch/kubeflow/schemas.json: what Kubeflow's kinds accept, from its Python packages.

    pip download --no-deps kubeflow-trainer-api==2.3.0 kubeflow-training==1.9.4
    python -m tools.kubeflow_schemas FOLDER_WITH_BOTH_UNPACKED

Their models are generated from the OpenAPI documents of Kubeflow Trainer and of the training operator. A manifest of
ours uses a few of the 150 definitions below a pod: `USED` are kept whole, any other one is cut to `{"type": "object"}`.
Objects refuse fields that they do not declare, as `kubectl apply --validate=strict` does.
"""

import ast
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

OUTPUT = Path("tests/parallel/launch/kubeflow/schemas.json")

USED: dict[str, tuple[str, ...]] = {
    "IoK8sApiBatchV1": ("JobSpec", "JobTemplateSpec"),
    "IoK8sApiCoreV1": (
        *("Container", "EmptyDirVolumeSource", "EnvVar", "PersistentVolumeClaimVolumeSource", "PodSpec"),
        *("PodTemplateSpec", "ResourceRequirements", "Volume", "VolumeMount"),
    ),
    "IoK8sApimachineryPkgApisMetaV1": ("ObjectMeta",),
    "JobsetV1alpha2": ("FailurePolicy", "JobSetSpec", "ReplicatedJob"),
    "KubeflowOrgV1": ("ElasticPolicy", "PyTorchJob", "PyTorchJobSpec", "ReplicaSpec", "RunPolicy"),
    "TrainerV1alpha1": (
        *("JobSetTemplateSpec", "MLPolicy", "RuntimeRef", "TorchMLPolicySource", "TrainJob", "TrainJobSpec"),
        *("Trainer", "TrainingRuntime", "TrainingRuntimeSpec"),
    ),
}
"""Definitions that are kept, by the begin of their names."""

SCALARS: dict[str, Any] = {
    "IoK8sApimachineryPkgApiResourceQuantity": {"type": ["string", "number"]},
    "IoK8sApimachineryPkgUtilIntstrIntOrString": {"type": ["string", "integer"]},
}
TYPES = {"int": "integer", "str": "string", "bool": "boolean"}
PYTORCH = {
    "KubeflowOrgV1PyTorchJob": ("kubeflow_org_v1_py_torch_job", ["spec"]),
    "KubeflowOrgV1PyTorchJobSpec": ("kubeflow_org_v1_py_torch_job_spec", ["pytorchReplicaSpecs"]),
    "KubeflowOrgV1ElasticPolicy": ("kubeflow_org_v1_elastic_policy", []),
    "KubeflowOrgV1ReplicaSpec": ("kubeflow_org_v1_replica_spec", []),
    "KubeflowOrgV1RunPolicy": ("kubeflow_org_v1_run_policy", []),
}
"""Module, and the required fields: those of the custom resource, which asks for less than the Python package does."""

CORE = {
    "V1PodTemplateSpec": "IoK8sApiCoreV1PodTemplateSpec",
    "V1ObjectMeta": "IoK8sApimachineryPkgApisMetaV1ObjectMeta",
}


def trainer_definitions(folder: Path) -> dict[str, Any]:
    """Definitions below the two kinds of Kubeflow Trainer, and of Kubernetes."""
    sys.path.insert(0, str(folder))
    found: dict[str, Any] = {}
    for module, kind in (
        ("trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob"),
        ("trainer_v1alpha1_training_runtime", "TrainerV1alpha1TrainingRuntime"),
    ):
        model = vars(import_module(f"kubeflow_trainer_api.models.{module}"))[kind]
        schema = model.model_json_schema(by_alias=True)
        found |= schema.pop("$defs") | {kind: schema}
    return {name: _plain(one) for name, one in found.items()}


def pytorch_definitions(folder: Path) -> dict[str, Any]:
    """Definitions of the training operator, whose package has types as text."""
    found = {}
    for name, (module, required) in PYTORCH.items():
        tree = ast.parse((folder / "kubeflow/training/models" / f"{module}.py").read_text())
        tables = {
            one.targets[0].id: ast.literal_eval(one.value)
            for one in ast.walk(tree)
            if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name) and isinstance(one.value, ast.Dict)
        }
        kinds, names = tables["openapi_types"], tables["attribute_map"]
        properties = {names[field]: _of_text(kind) for field, kind in kinds.items()}
        found[name] = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return found


def _of_text(kind: str) -> dict[str, Any]:
    """Such as `int`, `dict(str, KubeflowOrgV1ReplicaSpec)` or `V1PodTemplateSpec`."""
    head, _, inner = kind.rstrip(")]").replace("[", "(").partition("(")
    if head == "list":
        return {"type": "array", "items": _of_text(inner)}
    if head == "dict":
        return {"type": "object", "additionalProperties": _of_text(inner.partition(", ")[2])}
    return {"type": TYPES[head]} if head in TYPES else {"$ref": f"#/$defs/{CORE.get(head, head)}"}


def _plain(node: Any) -> Any:
    """A schema without texts, defaults and null."""
    if isinstance(node, list):
        return [_plain(one) for one in node]
    if not isinstance(node, dict):
        return node
    kinds = [one for one in node.get("anyOf", []) if one != {"type": "null"}]
    if len(kinds) == 1:
        return _plain(kinds[0])
    plain = {key: _plain(one) for key, one in node.items() if key not in ("default", "description", "title")}
    if "properties" not in node:
        return plain
    fields = {name: _plain(one) for name, one in node["properties"].items()}  # a field may be called `default`
    return plain | {"properties": fields, "additionalProperties": False}


def _references(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(_references, node))
    if not isinstance(node, dict):
        return set()
    own = {node["$ref"].rpartition("/")[2]} if isinstance(node.get("$ref"), str) else set()
    return own.union(*map(_references, node.values()))


def main() -> None:
    (folder,) = map(Path, sys.argv[1:])
    found = trainer_definitions(folder) | pytorch_definitions(folder)
    kept = {begin + end: found[begin + end] for begin, ends in USED.items() for end in ends}
    cut: dict[str, Any] = {name: {"type": "object"} for name in _references(kept) - kept.keys()}
    definitions = cut | kept | {name: one for name, one in SCALARS.items() if name in cut}
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps({"$defs": definitions}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
