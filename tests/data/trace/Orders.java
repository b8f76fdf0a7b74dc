import com.datadoghq.profiler.JavaProfiler;
import com.datadoghq.profiler.OTelContext;
import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.lang.management.ManagementFactory;
import java.lang.management.ThreadMXBean;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.URI;
import java.net.URLConnection;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.concurrent.Executors;
import java.util.concurrent.ThreadLocalRandom;

/** Calls the next service: {@code Orders LIBRARY PORT NEXT}. Responds with the spans' measurements. */
public final class Orders {
    private static final ThreadMXBean THREADS = ManagementFactory.getThreadMXBean();
    private static final ByteBuffer BUFFER = ByteBuffer.allocateDirect(1 << 20);
    private static volatile long result;
    private static JavaProfiler profiler;
    private static FileChannel zero;
    private static String next;

    private interface Action {
        void run() throws IOException;
    }

    private static long work(long ms, Action action) throws IOException {
        long start = THREADS.getCurrentThreadCpuTime();
        while (THREADS.getCurrentThreadCpuTime() < start + ms * 1_000_000) {
            action.run();
        }
        return THREADS.getCurrentThreadCpuTime() - start;
    }

    private static void compute() {
        long sum = result;
        for (int i = 0; i < 200_000; i++) {
            sum = sum * 31 + i;
        }
        result = sum;
    }

    private static void read() throws IOException {
        BUFFER.clear();
        zero.read(BUFFER);
    }

    private static String ask(String trace, String span, String ms) throws IOException {
        URLConnection connection = URI.create("http://127.0.0.1:" + next + "/").toURL().openConnection();
        connection.setRequestProperty("traceparent", "00-" + trace + "-" + span + "-01");
        connection.setRequestProperty("ms", ms);
        return new String(connection.getInputStream().readAllBytes(), StandardCharsets.UTF_8);
    }

    private static void handle(HttpExchange exchange) throws IOException {
        String trace = exchange.getRequestHeaders().getFirst("traceparent").split("-")[1];
        String text = exchange.getRequestHeaders().getFirst("ms");
        long ms = Long.parseLong(text);
        long high = Long.parseUnsignedLong(trace.substring(0, 16), 16);
        long low = Long.parseUnsignedLong(trace.substring(16), 16);
        long span = ThreadLocalRandom.current().nextLong() | 1;
        String hex = String.format("%016x", span);
        profiler.setTraceContext(span, span, high, low, 0, "POST /orders", -1, null);
        try {
            long start = System.nanoTime() - THREADS.getCurrentThreadCpuTime();
            long user = work(ms, Orders::compute);
            long kernel = work(ms, Orders::read);
            Thread.sleep(ms);
            String others = ask(trace, hex, text);
            long waited = System.nanoTime() - THREADS.getCurrentThreadCpuTime() - start;
            String answer = String.format(
                "[{\"service\": \"orders\", \"span\": \"%s\", \"used\": [%d, %d], \"waited\": %d}, %s",
                hex, user, kernel, waited, others.substring(1));
            byte[] body = answer.getBytes(StandardCharsets.UTF_8);
            exchange.sendResponseHeaders(200, body.length);
            exchange.getResponseBody().write(body);
            exchange.close();
        } catch (InterruptedException error) {
            throw new IOException(error);
        } finally {
            profiler.clearTraceContext();
        }
    }

    public static void main(String[] words) throws Exception {
        profiler = JavaProfiler.getInstance(words[0], null);
        OTelContext context = new OTelContext(words[0], null, error -> error.printStackTrace());
        String[] names = {"otel_kprofiler.local_root_span.name"};
        context.initializeAllContext("test", "host", "1", "orders", "1", "1", names);
        zero = FileChannel.open(Path.of("/dev/zero"));
        next = words[2];
        InetAddress here = InetAddress.getByName("127.0.0.1");
        HttpServer server = HttpServer.create(new InetSocketAddress(here, Integer.parseInt(words[1])), 0);
        server.createContext("/", Orders::handle);
        server.setExecutor(Executors.newFixedThreadPool(1));
        server.start();
    }
}
