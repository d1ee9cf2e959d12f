"""The descriptor set that Envoy's transcoder reads: the OpenAI services and everything they import."""

from __future__ import annotations

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from kvmesh.v1 import inference_pb2, openai_pb2

OPENAI_SERVICE: str = openai_pb2.DESCRIPTOR.services_by_name["OpenAI"].full_name
FILES_SERVICE: str = openai_pb2.DESCRIPTOR.services_by_name["OpenAIFiles"].full_name
INFERENCE_SERVICE: str = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


def openai_descriptor_set() -> bytes:
    """A serialised FileDescriptorSet, imports before importers."""
    files: dict[str, FileDescriptor] = {}
    _collect(openai_pb2.DESCRIPTOR, files)
    result = FileDescriptorSet()
    for file in files.values():
        file.CopyToProto(result.file.add())
    return result.SerializeToString(deterministic=True)


def _collect(file: FileDescriptor, files: dict[str, FileDescriptor]) -> None:
    for dependency in file.dependencies:
        if dependency.name not in files:
            _collect(dependency, files)
    files.setdefault(file.name, file)
