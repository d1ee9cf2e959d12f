"""A multipart/form-data body as it comes: fields are kept, the file goes to disk. Blocking: callers are threads."""

from __future__ import annotations

from collections.abc import Callable

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from services.gateway.batches.file_store import Upload
from services.gateway.errors import InvalidRequest

_FILE = "file"
_MAX_FIELDS = 16
_MAX_FIELD_BYTES = 1024
_MAX_FILENAME = 255


class UploadForm:
    """One body: `feed` all of it, then `close`. begin: makes the file that its bytes are written to."""

    def __init__(self, content_type: str, begin: Callable[[], Upload]) -> None:
        """Raises InvalidRequest for another type of body."""
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise InvalidRequest("the body must be multipart/form-data with a boundary")
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.upload: Upload | None = None
        self._begin = begin
        self._header = b""
        self._disposition = b""
        self._value = b""
        self._name = ""
        self._value_of_field = bytearray()
        self._is_file = self._is_over = False
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    def feed(self, data: bytes) -> None:
        """The next bytes. Raises GatewayError and OSError."""
        try:
            self._parser.write(data)
        except FormParserError:
            raise InvalidRequest("the body is not valid multipart/form-data") from None

    def close(self) -> Upload:
        """The file; its bytes are all written. Raises InvalidRequest."""
        if not self._is_over:
            raise InvalidRequest("the body ends in the middle of a part")
        if self.upload is None:
            raise InvalidRequest("a file must be given", _FILE)
        return self.upload

    def discard(self) -> None:
        """Remove what was written and is not finished. Idempotent."""
        if self.upload is not None:
            self.upload.discard()

    def _on_part_begin(self) -> None:
        self._disposition, self._name, self._is_file = b"", "", False
        self._value_of_field.clear()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._is_file = self._name == _FILE
        if self._is_file:
            if self.upload is not None:
                raise InvalidRequest("one file at a time", _FILE)
            self.filename = options.get(b"filename", b"").decode(errors="replace")[:_MAX_FILENAME]
            self.upload = self._begin()
        elif len(self.fields) >= _MAX_FIELDS:
            raise InvalidRequest(f"a form has at most {_MAX_FIELDS} fields")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            assert self.upload is not None
            self.upload.write(data[start:end])
            return
        self._value_of_field += data[start:end]
        if len(self._value_of_field) > _MAX_FIELD_BYTES:
            raise InvalidRequest(f"a field has at most {_MAX_FIELD_BYTES} bytes", self._name[:64])

    def _on_part_end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._value_of_field.decode(errors="replace")

    def _on_end(self) -> None:
        self._is_over = True
