-- Keeps headers that gRPC would choke on from the gateways. Makes every HTTP reply plain HTTP, and gives error replies
-- the body of an OpenAI error. Native gRPC replies pass untouched.
--
-- The gateway sends the error's JSON as trailing metadata; the transcoder, which has run before this filter on the
-- way out, has made a header of it unless headers had gone before. Where it is absent (the gRPC runtime itself refused, or Envoy made the reply) the
-- body is kept if it has the shape already, and is made from the status otherwise.

local RETRY_AFTER_S = "1"
-- What gRPC and the transcoder leave on a reply; an HTTP client has no use for it.
local GRPC_HEADERS = {"grpc-status", "grpc-message", "grpc-accept-encoding"}

-- BODIES (by status), REFUSED and FAILED (for any other 4xx and 5xx) are put before this text by local_replies.py.
local function generic_body(status)
  return BODIES[status] or (status < "500" and REFUSED or FAILED)
end

-- A gRPC server parses these by itself, and one that does not parse spoils the name in the header table of the
-- connection that all clients share: every later request with that name would fail. So none passes unchecked.
local ENCODINGS = {identity = true, gzip = true, deflate = true}

local function is_safe(name, value)
  if name == "grpc-encoding" then
    return ENCODINGS[value] or false
  end
  return name == "grpc-timeout" or name == "grpc-accept-encoding" or not (name:find("^grpc%-") or name:find("%-bin$"))
end

local function is_deadline(value)
  return #value <= 9 and value:find("^%d+[HMSmun]$") ~= nil
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local unsafe = {}
  for name, value in pairs(headers) do
    if name == "grpc-timeout" and not is_deadline(value) then
      handle:respond({[":status"] = "400"}, "grpc-timeout is malformed")
      return
    end
    if not is_safe(name, value) then
      table.insert(unsafe, name)
    end
  end
  for _, name in ipairs(unsafe) do
    headers:remove(name)
  end
end

-- Removes and returns a value of headers or trailers; nil where there is none, or no trailers at all.
local function take(map, name)
  local value = map and map:get(name)
  if value then
    map:remove(name)
  end
  return value
end

function envoy_on_response(handle)
  local headers = handle:headers()
  local status = headers:get(":status")
  local content_type = headers:get("content-type") or ""
  if content_type:find("application/grpc", 1, true) == 1 then
    return
  end
  for _, name in ipairs(GRPC_HEADERS) do
    headers:remove(name)
  end
  if status < "400" then
    return
  end
  -- Where headers had gone out before the failure, its details follow in trailers. Both calls wait, and nothing that was
  -- taken before a wait may be used after it.
  handle:body(true)
  local trailers = handle:trailers()
  headers = handle:headers()
  local error_json = take(headers, "x-openai-error") or take(trailers, "x-openai-error")
  local retry_after_s = headers:get("retry-after") or take(trailers, "retry-after")
  if status == "429" or status == "503" then
    retry_after_s = retry_after_s or RETRY_AFTER_S
  end
  if retry_after_s then
    headers:replace("retry-after", retry_after_s)
  end
  local body = handle:body(true)
  if not error_json then
    local length = body:length()
    if length > 0 and body:getBytes(0, math.min(length, 9)) == '{"error":' then
      return
    end
    error_json = generic_body(status)
  end
  headers:replace("content-length", tostring(body:setBytes(error_json)))
  headers:replace("content-type", "application/json")
end
